"""Drafts that the model makes itself are those of the report, wherever a row has come from; tokens stay."""

from functools import partial
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from spmd_tx.protocol.commands import REJECTED, Decode
from spmd_tx.worker.engine import Engine
from spmd_tx.worker.programs.compiled import Programs
from tests.golden.adapter_cases import ADAPTER, Case, merge
from tests.golden.families import LENGTH, tokens
from tests.support.in_process_sampler import Sampler
from tests.support.mtp_models import FAMILIES, expected_logits, write_with_mtp
from tests.support.tiny_engine import mesh_name
from tests.support.tiny_setup import tiny_setup
from tests.worker.test_family_gradients import MAX_RANK, OURS, SLOTS, in_slots

pytestmark = pytest.mark.usefixtures("quickly_compiled")

TOKENS, PAGE_SIZE, STEPS = 12, 8, 6  # a prompt and two answers are 64 tokens: one program of logits
QUICK = ("qwen3_5_moe", (2, 2, 2))  # has states and experts; tests/models/test_mtp.py compares others
SAME, SAME_OF_STATES = 2e-5, 4e-4  # nats; states add up what was rounded before
CLEAR = 1e-3  # in logits: where two tokens are nearer, rounding may decide
SESSION = {"sampling_session_id": "s:sample:0"}
SPECULATES = {"speculates": True, "draft_cost": 0.01}


class Watched(Sampler):
    """Keeps the replies to Decodes that follow drafts of the model."""

    def __init__(self, engine: Engine, versions: tuple[int, ...] = (OURS,), **shapes) -> None:
        super().__init__(engine, ADAPTER, versions, **shapes)
        self.replies = []
        self.engine = SimpleNamespace(execute=partial(self._execute, engine))

    def _execute(self, engine, command):
        arrays, numbers = engine.execute(command)
        if isinstance(command, Decode):
            self.replies.append({name: np.asarray(each) for name, each in arrays.items()})
        return arrays, numbers

    def answer_to(self, prompt, version, name, count=TOKENS, **options):
        """Return the tokens, their log-probabilities, and the drafts behind them as far as some were made."""
        self.replies.clear()
        self.ask(name, [int(token) for token in prompt], count, version, temperature=1.0, seed=7, **options)
        self.run()
        (found,) = self.results[name].sequences
        drafts, place = {}, 0
        for reply in self.replies:
            steps, columns = np.nonzero(reply["tokens"] >= 0)
            for step, column in zip(steps, columns, strict=True):
                if "drafts" in reply:
                    drafts[place] = int(reply["drafts"][step, column])
                place += 1
        assert place == count
        return np.frombuffer(found.tokens, np.int32), np.frombuffer(found.logprobs, np.float32), drafts


@pytest.fixture(
    scope="module",
    params=[
        pytest.param((family, mesh), marks=() if (family, mesh) == QUICK else pytest.mark.slow)
        for family in FAMILIES
        for mesh in [(2, 2, 2), (1, 1, 1)]
    ],
    ids=lambda param: f"{param[0]}-{mesh_name(param[1])}",
)
def setting(request, tmp_path_factory):
    """The models without and with an adapter merged in, and an engine that holds it in a training slot."""
    family, (fsdp, ep, tp) = request.param
    path = write_with_mtp(tmp_path_factory.mktemp("model"), family)
    merged = write_with_mtp(tmp_path_factory.mktemp("merged"), family)
    tensors = {name: np.array(each) for name, each in load_file(merged / "model.safetensors").items()}
    case = Case(family)
    merge(case, tensors)
    save_file(tensors, merged / "model.safetensors")
    setup = tiny_setup(
        model_dir=str(path),
        speculation="mtp",
        fsdp=fsdp,
        ep=ep,
        tp=tp,
        adapter_slots=SLOTS,
        max_rank=MAX_RANK,
        max_context=LENGTH + 2 * TOKENS,
        page_size=PAGE_SIZE,
        kv_cache_tokens=1024,
        decode_rows=8,
        decode_steps=STEPS,
    )
    engine = Engine.start(setup, Programs(lambda what: None), lambda what: None)
    placed = jax.tree.map(
        lambda own, w: jax.device_put(own, w.sharding), in_slots(case), engine.state.train.w
    )
    scale = np.full(engine.state.train.scale.shape, ADAPTER.scale, np.float32)
    engine.state.train = engine.state.train.replace(
        w=placed, scale=jax.device_put(scale, engine.state.train.scale.sharding)
    )
    return engine, family, {None: path, OURS: merged}


def assert_expected(path, text, first, drafts):
    """Compare drafts, by the number of the token that each was made behind, with those of the report."""
    expected = expected_logits(path, np.array(text, np.int32))
    compared = 0
    for number, draft in drafts.items():
        if first + number - 1 >= len(expected):
            continue
        row = expected[first + number - 1]
        assert row.max() - row[draft] < CLEAR, f"behind token {number}"
        compared += 1
    assert compared


@pytest.mark.parametrize("version", [None, OURS], ids=["base", "adapted"])
def test_drafts_are_those_of_the_report_and_tokens_stay(setting, version):
    engine, family, paths = setting
    prompt = tokens(family)
    expected, its_logprobs, nothing = Watched(engine).answer_to(prompt, version, "plain")
    assert not nothing
    ahead = Watched(engine, **SPECULATES)
    found, logprobs, drafts = ahead.answer_to(prompt, version, "ahead", **SESSION)
    np.testing.assert_array_equal(found, expected)
    rounding = SAME_OF_STATES if engine.plan.state_slots else SAME
    np.testing.assert_allclose(logprobs, its_logprobs, rtol=0, atol=rounding)
    assert_expected(paths[version], [*prompt, *found], LENGTH, drafts)
    # Behind pages that a prompt, rows of drafts and plain rows have written.
    longer = [*prompt, *found[:-1]]
    of_session = ahead.batch._guesses._texts.of("s", longer).session
    of_session.of_model.note(right=32, wrong=0)  # it is believed again
    found, _, drafts = ahead.answer_to(longer, version, "again", **SESSION)
    assert ahead.results["again"].prompt_cache_hit_tokens >= LENGTH - 1
    assert_expected(paths[version], [*longer, *found], len(longer), drafts)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["glm4_moe", "qwen3_5"])
def test_the_bits_are_those_of_plain_steps(family, tmp_path):
    setup = tiny_setup(
        model_dir=str(write_with_mtp(tmp_path, family)),
        speculation="mtp",
        batch_invariant=True,
        max_context=LENGTH + TOKENS,
        page_size=PAGE_SIZE,
        kv_cache_tokens=1024,
        decode_rows=8,
        decode_steps=STEPS,
    )
    engine = Engine.start(setup, Programs(lambda what: None), lambda what: None)
    expected, its_logprobs, _ = Watched(engine, ()).answer_to(tokens(family), None, "plain")
    ahead = Watched(engine, (), **SPECULATES)
    found, logprobs, drafts = ahead.answer_to(tokens(family), None, "ahead")
    assert drafts
    assert any((reply["tokens"] == REJECTED).any() for reply in ahead.replies)
    np.testing.assert_array_equal(found, expected)
    np.testing.assert_array_equal(logprobs, its_logprobs)
