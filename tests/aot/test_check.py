"""The comparison with budgets, without compiling anything."""

from types import SimpleNamespace

import pytest

from spmd_tx.worker.aot.report import CollectiveReport, CopyReport, ProgramReport
from spmd_tx.worker.memory.accelerators import parse_devices
from tests.aot.check import FILE, Budget, Case, by_role, compare, figures_of, model_named, read, write

TEXT = """# budgets

["qwen3-4b v5e:2x4 2,1,4 2048"."decode"]
sorts = 0
bytes_moved = 1e10
launches = 500
known.launches = 800
"""


def test_a_case_may_have_fewer_adapters():
    (case,) = read(TEXT.replace("2048", "2048 adapters=4"))
    assert case.adapters == 4
    assert case.name == "qwen3-4b v5e:2x4 2,1,4 2048 adapters=4"


def test_a_case_may_have_a_base_in_fewer_bits():
    (case,) = read(TEXT.replace("2048", "2048 base-dtype=int8"))
    assert (case.adapters, case.base_dtype) == (8, "int8")
    assert case.name == "qwen3-4b v5e:2x4 2,1,4 2048 base-dtype=int8"
    with pytest.raises(ValueError, match="base is not an option of a case"):
        read(TEXT.replace("2048", "2048 base=int8"))


def test_a_case_may_speculate():
    (case,) = read(TEXT.replace("2048", "2048 speculation=mtp"))
    assert (case.base_dtype, case.speculation) == ("auto", "mtp")
    assert case.name == "qwen3-4b v5e:2x4 2,1,4 2048 speculation=mtp"


def lines(**found):
    (case,) = read(TEXT)
    figures = {"sorts": 0, "bytes_moved": 5e9, "launches": 800} | found
    return {line.figure: line for line in compare(case, {"decode": figures})}


def test_a_case_is_read():
    (case,) = read(TEXT)
    assert (case.model, case.devices, case.mesh, case.context) == ("qwen3-4b", "v5e:2x4", (2, 1, 4), 2048)
    assert case.is_tpu
    assert case.budgets["decode"] == Budget(
        {"sorts": 0, "bytes_moved": 1e10, "launches": 500}, {"launches": 800}
    )


@pytest.mark.parametrize(
    "figure, found, verdict, is_failure",
    [
        ("sorts", 0, "met", False),
        ("sorts", 1, "MISSED", True),
        ("bytes_moved", 1.2e10, "MISSED", True),
        ("launches", 800, "known miss", False),
        ("launches", 900, "WORSE than the known miss", True),
        ("launches", 400, "met now, so no longer a known miss", False),
    ],
)
def test_verdicts(figure, found, verdict, is_failure):
    line = lines(**{figure: found})[figure]
    assert (line.verdict, line.is_failure) == (verdict, is_failure)


def test_a_miss_names_program_budget_and_what_was_found():
    told = str(lines(bytes_moved=1.2e10)["bytes_moved"])
    assert told == "qwen3-4b v5e:2x4 2,1,4 2048, decode: bytes_moved 1.2e+10, budget 1e+10: MISSED"
    told = str(lines(launches=900)["launches"])
    assert told.endswith("launches 900, budget 500, 800 before: WORSE than the known miss")


@pytest.mark.parametrize(
    "line",
    ["speed = 3", "known.sorts = 1", 'known.bytes = 1\n["qwen3-4b 8xh100 8,1,1 2048"."dance"]\nsorts = 0'],
)
def test_what_is_no_budget_is_refused(line):
    with pytest.raises(ValueError, match="qwen3-4b"):
        read(f'["qwen3-4b 8xh100 8,1,1 2048"."train"]\n{line}\n')


def test_the_values_of_today_are_written():
    cases = read(TEXT)
    found = {cases[0].name: {"decode": {"sorts": 3, "bytes_moved": 5e9, "launches": 400}}}
    after = write(cases, found, TEXT)
    assert after.startswith("# budgets\n")
    (case,) = read(after)
    assert case.budgets["decode"].most == cases[0].budgets["decode"].most
    assert case.budgets["decode"].known == {"sorts": 3}


def test_what_was_not_compiled_stays_as_it_is():
    cases = read(TEXT)
    assert read(write(cases, {}, TEXT)) == cases


def program(name, kind, planned=0, *, length=0, is_usual=False):
    shape = SimpleNamespace(row_length=length)
    wanted = SimpleNamespace(kind=kind, is_usual=is_usual, planned=planned, shape=shape)
    return SimpleNamespace(name=name, wanted=wanted)


def test_programs_have_roles_whatever_their_sizes():
    programs = [
        program("train light 4x2048", "train", 50, length=2048, is_usual=True),
        program("train light 128x64", "train", 40, length=64),
        program("train full 1x8192", "train", 90, length=8192),
        program("forward 4x2048", "forward", length=2048, is_usual=True),
        program("prefill 1x1024", "prefill", 20, is_usual=True),
        program("copy_pages 128", "other"),
        program("copy_states 256", "other"),
        program("continued prefill 1x1024 after 8192", "prefill", 70),
        program("decode 128x2048 of 1", "decode", 5, is_usual=True),
        program("decode 128x8192 of 4", "decode", 9),
        program("encode 1024", "encode", 3),
        program("encode 4096", "encode", 8),
        program("gather", "other"),
    ]
    assert {role: each.name for role, each in by_role(programs).items()} == {
        "train": "train light 4x2048",
        "largest train": "train full 1x8192",
        "short train": "train light 128x64",
        "prefill": "prefill 1x1024",
        "largest prefill": "prefill 1x1024",
        "continued prefill": "continued prefill 1x1024 after 8192",
        "copy_pages": "copy_pages 128",
        "copy_states": "copy_states 256",
        "decode": "decode 128x2048 of 1",
        "widest decode": "decode 128x8192 of 4",
        "encode 1024": "encode 1024",
        "encode 4096": "encode 4096",
    }


def test_the_figures_of_a_program():
    report = ProgramReport(
        name="decode 8x64 of 1",
        kind="decode",
        memory_bytes=150,
        planned_bytes=100,
        copies=[
            CopyReport(array="cache.keys", operation="copy", count=2, bytes=5),
            CopyReport(array="one layer of base.layers.gate", operation="fusion", count=36, bytes=5),
        ],
        collectives=[
            CollectiveReport(
                name="all-reduce", dtype="f32", devices=8, between_hosts=False, count=3, bytes=7, sent_bytes=9
            )
        ],
    )
    figures = figures_of(report)
    assert (figures["memory"], figures["copies"], figures["layer_copies"]) == (1.5, 2, 36)
    assert (figures["collectives"], figures["collective_bytes"]) == (3, 7)


def test_the_budgets_of_the_tree_can_be_read():
    cases = read(FILE.read_text())
    assert {case.is_tpu for case in cases} == {True, False}
    for case in cases:
        model = model_named(case.model, case.base_dtype, case.speculation)
        assert (model.mtp is not None) == (case.speculation == "mtp")
        fsdp, ep, tp = case.mesh
        assert parse_devices(case.devices, None).count == fsdp * ep * tp
        assert isinstance(case, Case)
        for budget in case.budgets.values():
            assert budget.most["copies"] == budget.most["sorts"] == 0
