"""Constrained samples in a batch: what comes out depends on seed and grammar, not on masks sent or dropped.

The fake device hashes everything that a row's pages hold, so that a token that was dropped, but is still
read, changes all later ones.
"""

import json

import numpy as np
import pytest

from spmd_tx.coordinator.grammar import guide
from spmd_tx.coordinator.sampling.new_job import draw_seeds
from spmd_tx.protocol.commands import Decode
from tests.coordinator.sampling.bench import Bench, expected, free_pages, prompt_of
from tests.coordinator.sampling.fake_device import BASE, draw, redraw_within
from tests.support.letter_tokenizer import END, compiled, of_schema, text_of

PERSON = of_schema(
    {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 6}, "age": {"type": "integer"}},
        "required": ["name", "age"],
        "additionalProperties": False,
    }
)
WORDS = compiled("start: /[a-z ]{3,20}/")
GRAMMARS = {"json": PERSON, "words": WORDS}
PROMPT = prompt_of(9)


def constrained(name, prompt, grammar, count, *, index=0, stops=(END,)):
    """Return what a sample must draw: step by step, with the mask of every step."""
    follows, seeds = grammar.guide(stops, is_cautious=False), draw_seeds(None, name, index)
    content = list(prompt)
    while len(content) - len(prompt) < count and content[-1] not in stops:
        token, _ = draw(BASE, content, seeds)
        if follows.ahead:
            token = follows.ahead[0]
        else:
            token = redraw_within(follows.mask(), token, BASE, content, seeds)
        assert follows.take([token]) == 1
        content.append(token)
    return content[len(prompt) :]


@pytest.mark.parametrize("grammar", GRAMMARS)
@pytest.mark.parametrize("decode_steps", [1, 3, 8])
@pytest.mark.parametrize("batch_invariant", [False, True], ids=["any company", "batch-invariant"])
def test_a_constrained_sample_is_drawn_from_what_its_grammar_allows(grammar, decode_steps, batch_invariant):
    bench = Bench(decode_steps=decode_steps, batch_invariant=batch_invariant, on_cpu=True)
    bench.admit("ours", PROMPT, grammar=GRAMMARS[grammar], max_tokens=40, stop=[END], num_samples=3)
    bench.run()
    wanted = [constrained("ours", PROMPT, GRAMMARS[grammar], 40, index=index) for index in range(3)]
    assert bench.tokens("ours") == wanted
    if grammar == "json":
        finished = [json.loads(text_of(tokens)) for tokens in wanted if tokens[-1] == END]
        assert finished
        assert all(set(each) == {"name", "age"} for each in finished)


def test_an_obedient_model_needs_no_masks():
    """What a grammar allows anyway is drawn as without one."""
    bench = Bench()
    everything = compiled(r"start: /(.|\n)*/")
    bench.admit("free", PROMPT, max_tokens=30, stop=[])
    bench.admit("free again", PROMPT, max_tokens=30, stop=[], grammar=everything)
    bench.run()
    allowed = constrained("free again", PROMPT, everything, 30, stops=())
    if END not in expected("free again", PROMPT, 30)[0]:
        assert allowed == expected("free again", PROMPT, 30)[0]
    assert bench.tokens("free again") == [allowed]
    assert bench.tokens("free") == [expected("free", PROMPT, 30)[0]]


@pytest.mark.parametrize("grammar", GRAMMARS)
def test_company_draws_the_same_beside_it(grammar):
    bench = Bench(rows=4)
    bench.admit("free", PROMPT, max_tokens=30, stop=[])
    bench.admit("ours", PROMPT, grammar=GRAMMARS[grammar], max_tokens=30, stop=[END])
    bench.admit("other", prompt_of(5, 3), max_tokens=20, stop=[])
    bench.run()
    assert bench.tokens("free") == [expected("free", PROMPT, 30)[0]]
    assert bench.tokens("other") == [expected("other", prompt_of(5, 3), 20)[0]]
    assert bench.tokens("ours") == [constrained("ours", PROMPT, GRAMMARS[grammar], 30)]


@pytest.mark.parametrize("batch_invariant", [False, True], ids=["any company", "batch-invariant"])
def test_preemption_changes_nothing(batch_invariant):
    bench = Bench(rows=4, pages=22, decode_steps=4, batch_invariant=batch_invariant, on_cpu=True)
    names = ["a", "b", "c", "d"]
    for place, name in enumerate(names):
        bench.admit(name, prompt_of(9, place), grammar=PERSON, max_tokens=40, stop=[END], sampler=name)
    bench.run()
    for place, name in enumerate(names):
        assert bench.tokens(name) == [constrained(name, prompt_of(9, place), PERSON, 40)]
    assert free_pages(bench) == [21]


def test_trust_changes_the_speed_alone(monkeypatch):
    counts = {}
    for trusted in (2, 4, 16):
        monkeypatch.setattr(guide, "TRUSTED", trusted)
        bench = Bench()
        bench.admit("ours", PROMPT, grammar=PERSON, max_tokens=40, stop=[END])
        bench.run()
        counts[trusted] = len(bench.sent(Decode))
        assert bench.tokens("ours") == [constrained("ours", PROMPT, PERSON, 40)]
    assert len(set(counts.values())) > 1


@pytest.mark.parametrize("grammar", GRAMMARS)
@pytest.mark.parametrize("loose", [0.5, 0.99, 1.0])
def test_a_state_that_has_read_what_was_dropped_is_read_again(grammar, loose, monkeypatch):
    """The fake device fails if a state has read other tokens than the pages hold."""
    monkeypatch.setattr(guide, "LOOSE", loose)
    bench = Bench(state_slots=8, decode_steps=8)
    bench.admit("free", prompt_of(7, 2), max_tokens=30, stop=[])
    bench.admit("ours", PROMPT, grammar=GRAMMARS[grammar], max_tokens=40, stop=[END], num_samples=2)
    bench.run()
    wanted = [constrained("ours", PROMPT, GRAMMARS[grammar], 40, index=index) for index in range(2)]
    assert bench.tokens("ours") == wanted
    assert bench.tokens("free") == [expected("free", prompt_of(7, 2), 30)[0]]


def test_only_a_refused_token_brings_a_mask():
    bench = Bench()
    bench.admit("ours", PROMPT, grammar=WORDS, max_tokens=12, stop=[END])
    bench.run()
    decodes = bench.sent(Decode)
    assert decodes[0].masks is None
    assert sum(0 if each.masks is None else len(each.masks) for each in decodes) < 12
    assert any(each.masks is not None for each in decodes)


def test_texts_with_one_continuation_are_forced_and_marked():
    bench, watched = Bench(listener=lambda sample: watched.append(sample)), []
    fixed = compiled('start: "a fixed text " ("x" | "y")')
    bench.admit("ours", PROMPT, grammar=fixed, max_tokens=40, stop=[END])
    bench.run()
    tokens = bench.tokens("ours")[0]
    assert text_of(tokens) in ("a fixed text x", "a fixed text y")
    assert watched[-1].guide.forced == [True] * 13 + [False, True]
    assert np.all(np.array(bench.logprobs("ours")[0]) <= 0)
