"""Where all weights are trained, the layer that makes drafts stays as it is, also in what is exported."""

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file

from spmd_tx.protocol import commands
from spmd_tx.worker.engine import Engine
from spmd_tx.worker.programs.compiled import Programs
from tests.golden.families import LENGTH, tokens
from tests.support import moves, seeing_engine
from tests.support.mtp_models import write_with_mtp
from tests.support.tiny_engine import to_numpy
from tests.support.tiny_setup import tiny_setup
from tests.worker.test_engine import REPORTS, written
from tests.worker.test_mtp import PAGE_SIZE, SPECULATES, STEPS, TOKENS, Watched, assert_expected

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("quickly_compiled")]

FAMILY = "qwen3_5"  # that has such a layer, and no experts
ADAPTER = commands.AdapterSpec(rank=0)
ADAM = {"beta1": 0.9, "beta2": 0.99, "eps": 1e-8, "weight_decay": 0.01, "grad_clip_norm": 0.0}
OF_DRAFTS = "mtp."


def test_drafts_are_those_of_the_trained_model_and_of_a_layer_that_stays(tmp_path):
    model, folder = write_with_mtp(tmp_path / "model", FAMILY), tmp_path / "written"
    engine = start(model, tmp_path / "idle")
    frozen = to_numpy(engine.state.base.mtp)
    engine.execute(moves.create_adapter(adapter=ADAPTER))
    row = seeing_engine.row_of(engine, tokens(FAMILY), None)
    for _ in range(2):
        engine.execute(commands.ForwardBackward(rows=row, loss=seeing_engine.loss(row)))
        engine.execute(commands.OptimStep(slot=0, learning_rate=1e-2, **ADAM))
    with written(folder):
        engine.execute(moves.save_sampler(0, None, ADAPTER, folder))
    old, new = (load_file(each / "model.safetensors") for each in (model, folder))
    same = {name for name in old if np.array_equal(old[name], new[name])}
    assert same == {name for name in old if name.startswith(OF_DRAFTS)}

    expected = sampled_as_expected(engine, 0, folder)
    again = start(folder, tmp_path / "idle again")
    for one in (engine, again):
        kept = to_numpy(one.state.base.mtp)
        assert all(map(np.array_equal, jax.tree.leaves(kept), jax.tree.leaves(frozen)))
    np.testing.assert_array_equal(sampled_as_expected(again, None, folder), expected)


def start(model, idle) -> Engine:
    setup = tiny_setup(
        model_dir=str(model),
        idle_adapters=str(idle),
        compilation_cache="",
        speculation="mtp",
        full_copies=3,
        bank_slots=3,
        max_rank=1,
        max_context=LENGTH + TOKENS,
        page_size=PAGE_SIZE,
        kv_cache_tokens=1024,
        decode_rows=8,
        decode_steps=STEPS,
    )
    return Engine.start(setup, Programs(lambda what: None), lambda what: None, REPORTS)


def sampled_as_expected(engine: Engine, version: int | None, folder) -> np.ndarray:
    """Return tokens, which are those of plain steps, and whose drafts are those of the model as written."""
    prompt, versions = tokens(FAMILY), () if version is None else (version,)
    plain, _, _ = Watched(engine, versions).answer_to(prompt, version, "plain")
    found, _, drafts = Watched(engine, versions, **SPECULATES).answer_to(prompt, version, "ahead")
    np.testing.assert_array_equal(found, plain)
    assert_expected(folder, [*prompt, *found], LENGTH, drafts)
    return found
