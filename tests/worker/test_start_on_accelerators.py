"""What a worker settles before it compiles or allocates anything on GPUs, without a GPU."""

import jax
import msgspec
import pytest

from spmd_tx.worker import engine as engines
from spmd_tx.worker.engine import Engine
from spmd_tx.worker.memory.sizes import BatchShape
from spmd_tx.worker.programs import agreement, measurements
from spmd_tx.worker.programs.agreement import Agreement, must_agree
from tests.support.tiny_engine import MODEL
from tests.support.tiny_setup import tiny_setup


class Started(Engine):
    """Keeps what it is made of, and makes nothing of it."""

    def __init__(self, plan, mesh, declared, state, programs, report_aside):
        self.programs = programs


class Programs:
    kernels, compile_threads = "", 0

    def use(self, store, aside, agreement):
        self.agreement = agreement


@pytest.fixture
def start(monkeypatch, tmp_path):
    """Returns a function that starts a worker on absent GPUs, and returns its programs."""
    kept = jax.config.jax_enable_compilation_cache, jax.config.jax_default_matmul_precision
    monkeypatch.setattr(engines, "model_of", lambda *arguments: MODEL)
    monkeypatch.setattr(engines, "ahead_of_need", lambda plan, mesh: (None, None))
    monkeypatch.setattr(engines, "allocate", lambda plan, progress: (None, None))

    def run(*, processes, platform="gpu", **different):
        told = {}
        for module in (engines, agreement):
            monkeypatch.setattr(module, "platform", lambda mesh: platform)
        monkeypatch.setattr(agreement.jax, "process_count", lambda: processes)
        monkeypatch.setattr(engines, "agreed", lambda kernels, platform: kernels)
        monkeypatch.setattr(engines, "plan_memory", lambda *arguments: told.update(measure=arguments[-1]))
        monkeypatch.setattr(engines, "everybodys", lambda question, mine: [mine, "of-another", mine])
        setup = tiny_setup(
            compilation_cache=str(tmp_path / "cache"), kernel_choices=str(tmp_path / "choices"), **different
        )
        programs = Programs()
        Started.start(setup, programs, lambda words: None)  # pyright: ignore[reportArgumentType]
        programs.measure = told["measure"]
        return programs

    yield run
    jax.config.update("jax_enable_compilation_cache", kept[0])
    jax.config.update("jax_default_matmul_precision", kept[1])


def test_processes_of_gpus_agree_on_every_program_and_measurement(start):
    jax.config.update("jax_enable_compilation_cache", True)
    programs = start(processes=2)
    assert isinstance(programs.agreement, Agreement)
    assert isinstance(programs.measure.__self__, measurements.KeptMeasurements)
    assert not jax.config.jax_enable_compilation_cache, "JAX would find a program for one of them alone"


def test_one_process_has_nobody_to_agree_with(start):
    jax.config.update("jax_enable_compilation_cache", True)
    programs = start(processes=1)
    assert (programs.agreement, programs.measure) == (None, measurements.measure)
    assert jax.config.jax_enable_compilation_cache


def test_gpus_tell_the_choices_of_kernels_of_all_processes(start):
    mine, other = start(processes=2).kernels.split("+")
    assert other == "of-another"
    assert start(processes=2).kernels.split("+")[0] == mine, "as long as they are kept"
    assert start(processes=1, platform="tpu").kernels == ""


def test_float32_is_settled_before_anything_is_compiled(start):
    start(processes=1, dtype="float32")
    assert jax.config.jax_default_matmul_precision == "highest"


@pytest.mark.parametrize(
    "processes, platform, expected",
    [(2, "gpu", True), (2, "tpu", True), (2, "cpu", False), (1, "gpu", False)],
)
def test_processes_of_accelerators_must_agree(monkeypatch, processes, platform, expected):
    monkeypatch.setattr(agreement.jax, "process_count", lambda: processes)
    monkeypatch.setattr(agreement, "platform", lambda mesh: platform)
    assert must_agree(None) == expected  # pyright: ignore[reportArgumentType]


class Others:
    """Answers as another process would."""

    def __init__(self):
        self.answer = None  # None: the same

    def __call__(self, question, answer):
        return [answer, answer if self.answer is None else self.answer]


def test_what_was_measured_is_kept_unless_a_process_has_lost_it(monkeypatch, tmp_path):
    measured, others = [], Others()
    monkeypatch.setattr(measurements, "surroundings", lambda plan, mesh: "here")
    monkeypatch.setattr(measurements, "measure", lambda *asked: measured.append(asked) or 7)
    plan = msgspec.defstruct("Plan", [("pages", int)])(5)
    shape = BatchShape(4, 64)

    def ask(step="decode"):
        return measurements.KeptMeasurements(tmp_path, None, Agreement(others)).measure(plan, step, shape)

    assert [ask(), ask(), len(measured)] == [7, 7, 1]
    others.answer = "no"
    assert [ask(), len(measured)] == [7, 2]
    others.answer = None
    assert [ask("prefill"), len(measured)] == [7, 3]
    for file in tmp_path.iterdir():
        file.write_text("half a num")
    assert [ask(), len(measured)] == [7, 4]
