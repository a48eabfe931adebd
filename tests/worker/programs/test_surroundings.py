"""What makes two programs different, besides the shapes of their arguments."""

from dataclasses import replace

import jax
import msgspec
import pytest

from spmd_tx.demo import tiny_model
from spmd_tx.models.config import read_model_config
from spmd_tx.models.declared.rope import Rope
from spmd_tx.protocol.kernels import Kernels
from spmd_tx.sharding.mesh import make_mesh
from spmd_tx.worker.memory.plan import UsableMemory
from spmd_tx.worker.memory.refusal import make_plan
from spmd_tx.worker.memory.sizes import Sizes
from spmd_tx.worker.programs import surroundings as module
from spmd_tx.worker.programs.aside_messages import Begin
from spmd_tx.worker.programs.aside_process import Compiler
from spmd_tx.worker.programs.surroundings import surroundings, traced_settings
from tests.support.model_shapes import resized
from tests.support.tiny_setup import tiny_setup

MEMORY = UsableMemory(1 << 30, "tpu", most_cache_tokens=256)


@pytest.fixture(scope="module")
def mesh():
    return make_mesh(1, 1, 1)


@pytest.fixture(scope="module")
def plan(mesh, tmp_path_factory):
    folder = tiny_model.write(tmp_path_factory.mktemp("surroundings") / "model", tiny_model.Spec(n_layers=1))
    setup = tiny_setup(model_dir=str(folder), dtype="float32")
    return make_plan(Sizes(setup, read_model_config(folder), mesh, "float32"), MEMORY)


def with_sizes(plan, **different):
    return replace(plan, steps=replace(plan.steps, sizes=replace(plan.sizes, **different)))


def with_setup(plan, **different):
    return with_sizes(plan, setup=msgspec.structs.replace(plan.sizes.setup, **different))


def test_the_same_start_has_the_same_surroundings(plan, mesh):
    again = with_setup(plan, generation=7, jax_coordinator="elsewhere", idle_adapters="/other")
    assert surroundings(again, mesh) == surroundings(plan, mesh)


def test_it_is_the_same_whether_the_number_of_slots_was_chosen_or_given(plan, mesh):
    assert surroundings(with_setup(plan, may_have_fewer_slots=True), mesh) == surroundings(plan, mesh)


@pytest.mark.parametrize(
    "different",
    [{"decode_steps": 5}, {"max_rank": 2}, {"kernels": Kernels("gpu")}, {"bank_slots": 9}],
    ids=str,
)
def test_settings_of_the_server_are_part_of_them(plan, mesh, different):
    assert surroundings(with_setup(plan, **different), mesh) != surroundings(plan, mesh)


def test_the_model_is_part_of_them(plan, mesh):
    model = resized(plan.sizes.model, rope=Rope(5.0))
    other = with_sizes(plan, model=model)
    assert surroundings(other, mesh) != surroundings(plan, mesh)


def test_flags_settings_of_jax_and_devices_are_part_of_them(plan, mesh, monkeypatch):
    before = surroundings(plan, mesh)
    monkeypatch.setenv("XLA_FLAGS", "--xla_cpu_enable_fast_math=true")
    assert surroundings(plan, mesh) != before
    monkeypatch.undo()
    jax.config.update("jax_default_matmul_precision", "float32")
    try:
        assert surroundings(plan, mesh) != before
    finally:
        jax.config.update("jax_default_matmul_precision", None)
    assert surroundings(plan, make_mesh(2, 1, 1)) != before
    assert surroundings(plan, mesh) == before


def test_the_source_that_is_traced_is_part_of_them(tmp_path, monkeypatch):
    (tmp_path / "models").mkdir()
    (tmp_path / "coordinator").mkdir()
    monkeypatch.setattr(module.spmd_tx, "__file__", str(tmp_path / "__init__.py"))
    (tmp_path / "models" / "head.py").write_text("one = 1")
    before = module.source()
    (tmp_path / "coordinator" / "hub.py").write_text("one = 1")
    assert module.source() == before
    (tmp_path / "models" / "head.py").write_text("one = 2")
    assert module.source() != before


def test_a_child_with_other_surroundings_than_its_worker_compiles_nothing(plan, mesh):
    begin = Begin(
        setup=plan.sizes.setup,
        memory=MEMORY,
        settings=traced_settings(),
        surroundings=surroundings(plan, mesh).replace("jaxlib 0", "jaxlib 9"),
    )
    enabled = jax.config.jax_enable_compilation_cache
    try:
        with pytest.raises(ValueError, match=r"'jaxlib 0.* instead of 'jaxlib 9"):
            Compiler(begin)
    finally:
        jax.config.update("jax_enable_compilation_cache", enabled)
