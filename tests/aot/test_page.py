"""What is kept of a case, and the table that the documentation gets of it."""

from spmd_tx.worker.aot.report import ProgramReport
from tests.aot.check import read
from tests.aot.page import HEADER, MARK, PAGE, lines, read_lines
from tests.aot.reports import Reports, read_reports, write_reports
from tools.bench import tables

NAME = "qwen3-8b 8xh100 8,1,1 8192"
(CASE,) = read(f'["{NAME}"."train"]\nsorts = 0\n')


def program(name, **figures):
    return ProgramReport(name=name, kind="train", **figures)


def test_a_line_has_a_programs_figures():
    figures = {"flops": 1.5e14, "bytes_moved": 1.7636e12, "roofline_seconds": 0.5, "expected_seconds": 0.8}
    found = Reports(case=NAME, programs={"train": program("train mlp 4x2048", tokens=65536, **figures)})
    assert lines([CASE], {NAME: found}) == [
        ["qwen3-8b", "8 x h100", "8, 1, 1", "train mlp 4x2048", "150", "1,764", "500", "81,920"]
    ]


def test_programs_that_are_not_usual_have_no_line():
    found = Reports(case=NAME, programs={"largest train": program("train full 1x8192")})
    assert lines([CASE], {NAME: found}) == []


def test_roles_that_are_not_compiled_again_are_kept(tmp_path):
    folder = tmp_path / "case"
    folder.mkdir()
    write_reports(folder, Reports(case=NAME, programs={"train": program("old"), "decode": program("kept")}))
    write_reports(folder, Reports(case=NAME, programs={"train": program("new")}))
    programs = read_reports(tmp_path)[NAME].programs
    assert {role: each.name for role, each in programs.items()} == {"train": "new", "decode": "kept"}


def test_what_is_not_compiled_again_keeps_its_line():
    old = ["qwen3-8b", "8 x h100", "8, 1, 1", "train full 4x2048", "1", "2", "3", "4"]
    elsewhere = ["qwen3-8b", "8 x h100", "1, 1, 8", "train full 4x2048", "1", "2", "3", "4"]
    page = f"<!-- {MARK} -->\n{tables.markdown(HEADER, [old, elsewhere])}\n<!-- end of {MARK} -->\n"
    assert read_lines(page) == [old, elsewhere]
    assert lines([CASE], {}, read_lines(page)) == [old]
    found = Reports(case=NAME, programs={"train": program("train mlp 4x2048")})
    assert [line[3] for line in lines([CASE], {NAME: found}, [old])] == ["train mlp 4x2048"]


def test_a_model_that_also_makes_drafts_has_no_second_line():
    (drafting,) = read(f'["{NAME} speculation=mtp"."train"]\nsorts = 0\n')
    old = ["qwen3-8b", "8 x h100", "8, 1, 1", "train full 4x2048", "1", "2", "3", "4"]
    found = {drafting.name: Reports(case=drafting.name, programs={"train": program("train mlp 4x2048")})}
    assert lines([CASE, drafting], found, [old]) == [old]


def test_each_size_of_an_image_has_its_line():
    (case,) = read(f'["{NAME}"."encode 1024"]\nsorts = 0\n["{NAME}"."encode 4096"]\nsorts = 0\n')
    names = ["encode 1024", "encode 4096"]
    found = Reports(case=NAME, programs={name: program(name) for name in names})
    table = lines([case], {NAME: found})
    assert [line[3] for line in table] == [line[3] for line in lines([case], {}, table)] == names


def test_the_page_has_the_table_of_the_cases():
    assert read_lines(PAGE.read_text())
