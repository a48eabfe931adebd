"""``spmd-tx plan --compile``: which meshes it compiles for, and what it prints. Nothing is compiled here."""

import json
from types import SimpleNamespace

import pytest

from spmd_tx.cli import compile as command
from spmd_tx.cli.compile import CompiledMesh, Task, Wish
from spmd_tx.cli.meshes import Refusals
from spmd_tx.config import ServerConfig
from spmd_tx.errors import DoesNotFit, StartError
from spmd_tx.worker.aot.predict import NEEDED
from spmd_tx.worker.aot.report import CollectiveReport, Prediction, ProgramReport
from spmd_tx.worker.memory.accelerators import parse_devices
from tests.support.model_shapes import QWEN3_4B

DEVICES = parse_devices("8xh100", None)
SECONDS = {(8, 1, 1): 30.0, (4, 1, 2): 20.0, (1, 1, 8): 25.0}  # of an iteration
REDUCE = CollectiveReport(
    name="all-reduce", dtype="bf16", devices=8, between_hosts=False, count=73, bytes=5e7, sent_bytes=9e7
)
DECODE = "decode 128 of 1"


def program(name, *, is_usual=False):
    return SimpleNamespace(name=name, wanted=SimpleNamespace(kind=name.split()[0], is_usual=is_usual))


PROGRAMS = [program("gather"), *(program(f"{kind} 128 of 1", is_usual=True) for kind in NEEDED)]


def task_for(config, model, devices, wish, *, is_one) -> Task:
    """Stands in for planning; a mesh without a time does not fit."""
    if config.mesh not in SECONDS:
        raise DoesNotFit("this does not fit: a device has 1 GiB, and 2 are needed", "2 GiB are needed", 2)
    chosen = [each for each in PROGRAMS if each.name.startswith(wish.only or "")]
    return Task(config, devices, None, None, chosen, wish.hlo, "" if is_one else str(config.mesh))


class Compiler:
    """Stands in for compiling, and remembers what it was to compile."""

    def __init__(self, *failing):
        self.asked: list[tuple[str, str]] = []
        self.failing = failing  # (name of a mesh, name of a program)
        self.late = set[str]()  # names of programs

    def __call__(self, task, programs) -> CompiledMesh:
        seconds = SECONDS[task.config.mesh]
        self.asked += [(task.name, each.name) for each in programs]
        predicted = Prediction(
            training_tokens=1000.0,
            prefill_tokens=2000.0,
            decode_tokens=3000.0,
            iteration_seconds=seconds,
            iteration_sampling_seconds=seconds - 5,
            iteration_training_seconds=5.0,
        )
        reports = [
            ProgramReport(
                name=each.name,
                kind=each.wanted.kind if each.wanted.is_usual else "other",
                error="RESOURCE_EXHAUSTED: 21 GB" if (task.name, each.name) in self.failing else None,
                is_late=each.name in self.late,
                memory_bytes=2**30,
                planned_bytes=2**31,
                flops=2e12,
                bytes_moved=5e10,
                collectives=[REDUCE],
                launches=2000.0,
                roofline_seconds=0.015,
            )
            for each in programs
        ]
        has_all = {each.kind for each in reports if each.has_figures} >= {*NEEDED}
        return CompiledMesh(task, reports, predicted if has_all else None)


@pytest.fixture
def compiler(monkeypatch):
    """Returns what stands in for compiling."""
    monkeypatch.setattr(command.environment, "check", lambda devices: None)
    monkeypatch.setattr(command.environment, "prepare", lambda devices: None)
    monkeypatch.setattr(command, "task_for", task_for)
    found = Compiler()
    monkeypatch.setattr(command, "compiled", found)
    return found


@pytest.fixture
def run(compiler, capsys, monkeypatch):
    def compile_for(*meshes, as_json=False, wish=None):
        monkeypatch.setattr(command, "possible_meshes", lambda *arguments: [*meshes])
        config = ServerConfig(base_model="qwen3-4b")
        command.run(config, QWEN3_4B, DEVICES, wish or Wish(), as_json=as_json)
        return capsys.readouterr()

    return compile_for


def test_the_mesh_with_the_fastest_iteration_is_told(run):
    said = run((8, 1, 1), (4, 1, 2), (2, 1, 4), (1, 1, 8), as_json=True)
    told = json.loads(said.out)
    assert told["tensor_parallel_size"] == 2
    assert told["predicted"]["iteration_seconds"] == 20
    assert [mesh["tensor_parallel_size"] for mesh in told["meshes"]] == [2, 8, 1]
    assert said.err == "2, 1, 4: 2 GiB are needed\n"


def test_only_the_fastest_mesh_has_all_its_programs_compiled(run, compiler):
    said = run((8, 1, 1), (4, 1, 2), (1, 1, 8))
    others = {name for name, program in compiler.asked if program == "gather"}
    assert others == {"(4, 1, 2)"}
    assert len(compiler.asked) == 3 * len(NEEDED) + 1
    assert said.out.count("another mesh is faster") == 2


def test_the_next_mesh_is_compiled_if_a_program_of_the_fastest_fails(run, compiler):
    compiler.failing = [("(4, 1, 2)", "gather")]
    said = run((8, 1, 1), (4, 1, 2), (1, 1, 8))
    assert [name for name, program in compiler.asked if program == "gather"] == ["(4, 1, 2)", "(1, 1, 8)"]
    assert "best: --fully-sharded-data-parallel-size 1" in said.out


def test_all_programs_are_compiled_where_nothing_can_be_predicted(run, compiler):
    said = run((8, 1, 1), (4, 1, 2), wish=Wish(("decode", "gather")))
    assert len(compiler.asked) == 4
    assert "best" not in said.out


def test_json_has_the_figures_of_each_program(run):
    (program,) = json.loads(run((8, 1, 1), as_json=True, wish=Wish(("decode",))).out)["programs"]
    keys = (
        "name kind memory_bytes planned_bytes flops bytes_moved collectives launches roofline_seconds".split()
    )
    assert {*keys} <= program.keys()
    assert program["collectives"][0]["name"] == "all-reduce"


def test_tables_are_printed_the_best_mesh_last(run):
    said = run((4, 1, 2), (8, 1, 1)).out
    for words in (DECODE, "1.0 GiB", "2.0 GiB", "2000", "73 of", "15"):
        assert words in said
    assert said.index("--tensor-parallel-size 1") < said.index("--tensor-parallel-size 2")
    assert "best: --fully-sharded-data-parallel-size 4" in said


def test_a_mesh_that_does_not_fit_is_refused_if_there_is_no_other(run):
    with pytest.raises(StartError, match="does not fit"):
        run((2, 1, 4))


def test_programs_that_fail_are_named_at_the_end(run, compiler):
    compiler.failing = [("", DECODE)]
    with pytest.raises(StartError, match=f"could not be compiled: {DECODE}"):
        run((8, 1, 1))


def test_programs_that_are_late_are_counted_and_no_failure(run, compiler):
    compiler.late = {DECODE, "gather"}
    said = run((8, 1, 1), (4, 1, 2), wish=Wish(minutes=30))
    assert "3 programs were not compiled within 30 minutes; give more --minutes" in said.err
    assert said.out.count("│ late ") == 3
    assert "another mesh is faster" not in said.out
    assert "best" not in said.out


@pytest.mark.parametrize("folder", ["file/within", "file"])
def test_a_folder_that_cannot_be_written_is_refused_before_anything_is_compiled(
    run, compiler, tmp_path, folder
):
    (tmp_path / "file").write_text("")
    with pytest.raises(StartError, match=f"--hlo .*{folder} cannot be used: .*; give a folder"):
        run((8, 1, 1), wish=Wish(hlo=tmp_path / folder))
    assert not compiler.asked


def test_a_reason_that_all_meshes_share_is_said_once():
    refusals = Refusals(ServerConfig(base_model="m"), DEVICES)
    for mesh in SECONDS:
        refusals.add(mesh, StartError("--max-context-length is 100000"))
    assert str(refusals.error()) == "--max-context-length is 100000"
    refusals.add((2, 2, 2), StartError("128 experts cannot be split"))
    assert refusals.told() == [
        "8, 1, 1 and 4, 1, 2 and 1, 1, 8: --max-context-length is 100000",
        "2, 2, 2: 128 experts cannot be split",
    ]
