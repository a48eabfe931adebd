"""``spmd-tx plan --compile``: which meshes it compiles for, and what it prints. Nothing is compiled here."""

import json

import pytest

from spmd_tx.cli import compile as command
from spmd_tx.cli.compile import Compiled, Wish
from spmd_tx.config import ServerConfig
from spmd_tx.errors import StartError
from spmd_tx.worker.aot.report import CollectiveReport, Prediction, ProgramReport
from spmd_tx.worker.memory.accelerators import parse_devices
from tests.support.model_shapes import QWEN3_4B

DEVICES = parse_devices("8xh100", None)
SECONDS = {(8, 1, 1): 30.0, (4, 1, 2): 20.0, (1, 1, 8): 25.0}  # of an iteration
REDUCE = CollectiveReport(
    name="all-reduce", dtype="bf16", devices=8, between_hosts=False, count=73, bytes=5e7, sent_bytes=9e7
)


def found(config, model, devices, wish, say) -> Compiled:
    """Stands in for compiling; a mesh without a time does not fit."""
    if config.mesh not in SECONDS:
        raise StartError("this does not fit: a device has 1 GiB")
    say("compiling decode (1 of 1)")
    seconds = SECONDS[config.mesh]
    predicted = Prediction(
        training_tokens=1000.0,
        prefill_tokens=2000.0,
        decode_tokens=3000.0,
        iteration_seconds=seconds,
        iteration_sampling_seconds=seconds - 5,
        iteration_training_seconds=5.0,
    )
    program = ProgramReport(
        name="decode 128x2048 of 1",
        kind="decode",
        memory_bytes=2**30,
        planned_bytes=2**31,
        flops=2e12,
        bytes_moved=5e10,
        collectives=[REDUCE],
        launches=2000.0,
        roofline_seconds=0.015,
    )
    return Compiled(config, [program], predicted)


@pytest.fixture
def run(monkeypatch, capsys):
    monkeypatch.setattr(command.environment, "check", lambda devices: None)
    monkeypatch.setattr(command.environment, "prepare", lambda devices: None)
    monkeypatch.setattr(command, "compiled", found)

    def compile_for(*meshes, as_json=False):
        config = ServerConfig(base_model="qwen3-4b")
        command.run(config, QWEN3_4B, DEVICES, meshes, Wish(), as_json=as_json)
        return capsys.readouterr()

    return compile_for


def test_the_mesh_with_the_fastest_iteration_is_told(run):
    said = run((8, 1, 1), (4, 1, 2), (2, 1, 4), (1, 1, 8), as_json=True)
    told = json.loads(said.out)
    assert told["tensor_parallel_size"] == 2
    assert told["predicted"]["iteration_seconds"] == 20
    assert [mesh["tensor_parallel_size"] for mesh in told["meshes"]] == [2, 8, 1]
    assert "--tensor-parallel-size 4: this does not fit" in said.err
    assert "compiling decode (1 of 1)" in said.err


def test_json_has_the_figures_of_each_program(run):
    (program,) = json.loads(run((8, 1, 1), as_json=True).out)["programs"]
    keys = (
        "name kind memory_bytes planned_bytes flops bytes_moved collectives launches roofline_seconds".split()
    )
    assert {*keys} <= program.keys()
    assert program["collectives"][0]["name"] == "all-reduce"


def test_tables_are_printed_the_best_mesh_last(run):
    said = run((4, 1, 2), (8, 1, 1)).out
    for words in ("decode 128x2048 of 1", "1.0 GiB", "2.0 GiB", "2000", "73 of", "15"):
        assert words in said
    assert said.index("--tensor-parallel-size 1") < said.index("--tensor-parallel-size 2")
    assert "best: --fully-sharded-data-parallel-size 4" in said


def test_only_several_meshes_have_folders_of_their_own(tmp_path):
    wish = Wish(hlo=tmp_path)
    assert wish.of((8, 1, 1), [(8, 1, 1)]).hlo == tmp_path
    assert wish.of((8, 1, 1), [(8, 1, 1), (4, 1, 2)]).hlo == tmp_path / "8-1-1"
    assert Wish().of((8, 1, 1), [(8, 1, 1), (4, 1, 2)]).hlo is None


def test_no_mesh_is_the_best_where_nothing_is_predicted(run, monkeypatch):
    monkeypatch.setattr(command, "compiled", lambda config, *rest: Compiled(config, [], None))
    assert "best" not in run((4, 1, 2), (8, 1, 1)).out


def test_a_mesh_that_does_not_fit_is_refused_if_there_is_no_other(run):
    with pytest.raises(StartError, match="does not fit"):
        run((2, 1, 4))


def test_programs_that_fail_are_named_at_the_end(run, monkeypatch):
    def failed(config, *rest):
        program = ProgramReport(name="prefill 1x1024", kind="prefill", error="RESOURCE_EXHAUSTED: 21 GB")
        return Compiled(config, [program], None)

    monkeypatch.setattr(command, "compiled", failed)
    with pytest.raises(StartError, match="could not be compiled: prefill 1x1024"):
        run((8, 1, 1))
