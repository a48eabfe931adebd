"""recipes/rl_loop.py, unmodified, with a tiny model of every family."""

import json
from dataclasses import replace

import pytest

from spmd_tx.demo import tiny_model
from spmd_tx.demo.tiny_families import FAMILIES
from tests.cookbook.conftest import ROWS, served
from tests.cookbook.cookbook import ENVIRONMENT, HERE, PYTHON, Cookbook, run_python
from tests.cookbook.test_rl_loop import LEARNING_RATE, finds_the_frequent_answer, rl_loop

pytestmark = [pytest.mark.cookbook, pytest.mark.timeout(1200)]

NAME = "Qwen/Qwen3-8B"  # of which the recipe knows how to render a conversation
SIZES = {"d_model": 128, "n_heads": 4, "n_kv_heads": 2, "head_dim": 32, "d_ff": 384, "vocab_size": 640}
OF_FAMILY = {family: {"n_kv_heads": 4} for family in ("glm4_moe_lite", "deepseek_v3")}  # latent attention


@pytest.mark.parametrize("family", [family for family in FAMILIES if family != "qwen3"])
def test_rl_loop_finds_the_frequent_answer(tmp_path, environment, pytestconfig, family):
    sizes = SIZES | OF_FAMILY.get(family, {})
    model = tiny_model.write(tmp_path / "model", tiny_model.Spec(family=family, max_positions=32768, **sizes))
    (taught,) = (ENVIRONMENT / "hub" / "hub").glob(f"models--{NAME.replace('/', '--')}/snapshots/*")
    given = {"model": str(model), "taught": str(taught)}
    run_python(environment, [PYTHON, str(HERE / "teach_family.py"), json.dumps(given)])
    rows = pytestconfig.stash[ROWS]
    with served(str(model), tmp_path, environment | {"SPMD_TX_SERVED_MODEL_NAME": NAME}, NAME) as server:
        recipes = Cookbook(server, environment | {"TINKER_BASE_URL": server.url}, tmp_path, rows)
        run = rl_loop(recipes, learning_rate=LEARNING_RATE, loss_fn="importance_sampling")
        rows[-1] = replace(rows[-1], command=f"{rows[-1].command} ({family})")
        assert server.complaints() == []
    assert finds_the_frequent_answer(run)
