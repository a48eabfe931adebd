"""What a client's grammar may cost: some are refused, and none ends the process or stops the others."""

import signal
import threading

import pytest

from spmd_tx.bounds import Bounds
from spmd_tx.coordinator.grammar import compiler
from spmd_tx.coordinator.grammar.call_grammars import Rules
from spmd_tx.coordinator.grammar.compiler import Grammars
from spmd_tx.coordinator.text.model_text import LazyModelText, load_model_text
from spmd_tx.coordinator.text.prompt_texts import PromptTexts
from spmd_tx.demo import tiny_model
from spmd_tx.errors import InvalidRequest

VOCABULARY = tiny_model.PRESETS["tiny"].vocab_size
PERSON = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}


def of_schema(schema):
    rules = Rules({})
    start = rules.json(schema, is_strict=False)
    return "\n".join([f"start: {start}", *rules.lines, ""])


def chained(length):
    links = {f"d{place}": {"anyOf": [{"$ref": f"#/$defs/d{place + 1}"}]} for place in range(length)}
    return {"$ref": "#/$defs/d0", "$defs": links | {f"d{length}": {"type": "null"}}}


def optional(count):
    return {"type": "object", "properties": {f"{number:x}": {} for number in range(count)}}


COSTLY = {
    "a long chain of references": of_schema(chained(3000)),  # ends the child, and would end this process
    "thousands of optional properties": of_schema(optional(9000)),
}


@pytest.fixture
async def grammars(tmp_path):
    model = tiny_model.write(tmp_path)
    text = LazyModelText(lambda: load_model_text(model))
    prompt_texts = PromptTexts(model, text, 1 << 10, Bounds())
    yield Grammars(text, VOCABULARY, Bounds().grammar_bytes, prompt_texts)
    await prompt_texts.close()


async def test_what_takes_too_much_is_refused_and_others_go_on(grammars):
    for grammar in COSTLY.values():
        with pytest.raises(InvalidRequest, match="send a simpler one"):
            await grammars.compile(grammar)
    assert (await grammars.compile(of_schema(PERSON))).guide({0}, is_cautious=True).mask().any()


async def test_what_was_compiled_is_not_tried_again(grammars, monkeypatch):
    known = await grammars.compile(of_schema(PERSON))
    monkeypatch.setattr(compiler, "compile_source", None)
    assert await grammars.compile(of_schema(PERSON)) is known


async def test_what_cannot_be_used_is_refused_with_the_reason(grammars):
    with pytest.raises(InvalidRequest, match='names "nothing", which has no rule'):
        await grammars.compile("start: nothing\n")


def test_a_trial_leaves_the_limits_of_its_process_as_they_were(tmp_path):
    model, stack = tiny_model.write(tmp_path), threading.stack_size()
    before = signal.setitimer(signal.ITIMER_PROF, 3600.0)
    try:
        compiler.try_outside("start: /a/", str(model), VOCABULARY)
        with pytest.raises(InvalidRequest):
            compiler.try_outside("start: missing", str(model), VOCABULARY)
    finally:
        left = signal.setitimer(signal.ITIMER_PROF, *before)
    assert left[0] > 3000
    assert threading.stack_size() == stack
