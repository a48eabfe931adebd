"""The store of compiled programs: what is read from it, and what is written into it."""

import logging
import random
from functools import partial
from queue import SimpleQueue

import jax
import numpy as np
import pytest
from jax.experimental import serialize_executable

from spmd_tx.protocol.commands import AWAITED
from spmd_tx.protocol.programs import ProgramShape
from spmd_tx.sharding.mesh import make_mesh
from spmd_tx.worker.programs.call import Call
from spmd_tx.worker.programs.compiled import CompileOrder, Programs
from spmd_tx.worker.programs.store import ProgramStore

SECONDS = 60
PROGRAM = ProgramShape(step="optim_step")


@pytest.fixture(scope="module")
def mesh():
    return make_mesh(2, 1, 1)


@pytest.fixture
def store(tmp_path, mesh):
    return ProgramStore(tmp_path / "programs", "these surroundings", mesh)


def call(number=1.0, rows=4, variant=None):
    """A program that adds a number to rows."""
    step = jax.jit(lambda x: {"sum": x + np.float32(number)})
    return Call("add", (rows,), step, (), rows=(np.arange(rows, dtype=np.float32),), variant=variant)


def compiled(call, mesh):
    return call.step.lower(*call.abstract(mesh)).compile()


def new_number():
    """One that no earlier run has compiled a program with, so that JAX's cache has none."""
    return random.SystemRandom().random()


def order(store, mesh, *calls):
    settled = SimpleQueue()
    programs = Programs(lambda _: None, lambda number, seconds, error: settled.put(error))
    programs.use(store, None)
    programs.order(CompileOrder(1, PROGRAM, partial(list, calls)), mesh, lane=AWAITED)
    assert settled.get(timeout=SECONDS) is None
    return programs


def test_what_was_saved_is_loaded_and_computes_the_same(store, mesh):
    program = call(new_number())
    assert store.load(program) is None
    saved = compiled(program, mesh)
    store.save(program, saved)
    loaded = store.load(program)
    assert loaded is not saved
    np.testing.assert_array_equal(loaded(*program.rows)["sum"], saved(*program.rows)["sum"])
    assert loaded(*program.rows)["sum"].sharding == saved(*program.rows)["sum"].sharding


@pytest.mark.parametrize("other", [call(rows=6), call(variant="light")], ids=["shape", "variant"])
def test_another_program_is_not_taken_for_it(store, mesh, other):
    store.save(call(), compiled(call(new_number()), mesh))
    assert store.has(call())
    assert not store.has(other)


def test_programs_of_other_surroundings_are_not_found(store, tmp_path, mesh):
    store.save(call(), compiled(call(new_number()), mesh))
    assert not ProgramStore(tmp_path / "programs", "others", mesh).has(call())
    assert not ProgramStore(tmp_path / "programs", "these surroundings", make_mesh(4, 1, 1)).has(call())


def test_a_file_that_others_may_write_is_not_read(store, tmp_path, mesh, caplog):
    program = call(new_number())
    store.save(program, compiled(program, mesh))
    (file,) = (tmp_path / "programs").iterdir()
    assert file.stat().st_mode & 0o077 == 0
    file.chmod(0o666)
    assert store.load(program) is None
    assert "others may write it" in caplog.text
    assert not file.exists()


def test_what_an_awaited_order_compiles_is_kept_for_the_next_start(store, mesh):
    program = call(new_number())
    assert order(store, mesh, program).stop()
    assert store.load(program) is not None


def test_what_comes_from_the_cache_of_jax_is_not_saved_because_it_could_not_be_run(store, mesh):
    number = new_number()
    compiled(call(number), mesh)
    jax.clear_caches()
    assert order(store, mesh, call(number)).stop()
    assert not store.has(call(number))


def test_a_program_that_cannot_be_serialized_is_left_out_without_a_warning(store, mesh, caplog, monkeypatch):
    def refuse(compiled):
        raise jax.errors.JaxRuntimeError("UNIMPLEMENTED: `LessThan` is not serializable.")

    monkeypatch.setattr(serialize_executable, "serialize", refuse)
    program = call(new_number())
    programs = order(store, mesh, program)
    assert programs.run(program, mesh)["sum"].shape == (4,)
    assert programs.stop()
    assert not store.has(program)
    ours = [record for record in caplog.records if record.name.startswith("spmd_tx")]  # not the SDK's clients
    assert not [record for record in ours if record.levelno >= logging.WARNING]


def test_a_disk_that_cannot_be_written_costs_nothing_else(tmp_path, mesh, caplog):
    (tmp_path / "file").write_text("no folder")
    program = call(new_number())
    programs = order(ProgramStore(tmp_path / "file", "", mesh), mesh, program)
    assert programs.run(program, mesh)["sum"].shape == (4,)
    assert programs.stop()
    assert "could not store a program" in caplog.text
