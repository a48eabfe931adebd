"""Puts what check.py has found into docs/performance_calculated.md, a line for each usual program of a case.

python -m tests.aot.check cuda --hlo FOLDER; python -m tests.aot.check tpu --hlo FOLDER
python -m tests.aot.page FOLDER
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from spmd_tx.worker.aot.report import ProgramReport
from tests.aot.check import FILE, Case, read
from tests.aot.reports import Reports, read_reports
from tools.bench import tables

PAGE = Path(__file__).parents[2] / "docs" / "performance_calculated.md"
MARK = "make aot"
ROLES = ("train", "prefill", "decode", "encode 1024", "encode 4096")
HEADER = (
    *("model", "devices", "mesh (fsdp, ep, tp)", "program, per data shard"),
    *("TFLOP", "GB moved", "roofline, ms", "tokens/s at most"),
)
Line = list[str]  # its cells


def lines(cases: Sequence[Case], found: dict[str, Reports], before: Sequence[Line] = ()) -> list[Line]:
    """Return the lines of the table, in the order of the cases. ``before`` are those that the page has.

    Models that also make drafts have no lines of their own.
    """
    cases = [case for case in cases if case.speculation == "off"]
    kept = {(*line[:3], _role(line[3])): line for line in before}
    for case in cases:
        for role in ROLES:
            if case.name in found and role in found[case.name].programs:
                kept[*_place(case), role] = _line(case, found[case.name].programs[role])
    wanted = [(*_place(case), role) for case in cases for role in ROLES]
    return [kept[place] for place in wanted if place in kept]


def read_lines(text: str) -> list[Line]:
    """Return the lines of the table of a page. Raises ValueError if it has none."""
    _, begin, rest = text.partition(f"<!-- {MARK} -->")
    if not begin:
        raise ValueError(f"no part begins with <!-- {MARK} -->")
    table = rest.partition(f"<!-- end of {MARK} -->")[0]
    rows = [[cell.strip() for cell in row.strip("|").split("|")] for row in table.splitlines()]
    return [row for row in rows if len(row) == len(HEADER)][2:]


def _role(program: str) -> str:
    return program if program in ROLES else program.split()[0]


def _place(case: Case) -> tuple[str, str, str]:
    devices = case.devices if case.is_tpu else case.devices.replace("x", " x ", 1)
    model = case.model if case.base_dtype == "auto" else f"{case.model}, {case.base_dtype}"
    return model, devices, ", ".join(map(str, case.mesh))


def _line(case: Case, program: ProgramReport) -> Line:
    return [
        *_place(case),
        program.name,
        _short(program.flops / 1e12),
        _short(program.bytes_moved / 1e9),
        _short(1e3 * program.roofline_seconds),
        f"{program.tokens_per_second:,.0f}",
    ]


def _short(value: float) -> str:
    return f"{value:.3g}" if value < 999.5 else f"{value:,.0f}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="what was given to check.py as --hlo")
    folder = parser.parse_args().folder
    table = lines(read(FILE.read_text()), read_reports(folder), read_lines(PAGE.read_text()))
    tables.publish(PAGE, MARK, tables.markdown(HEADER, table))
    return 0


if __name__ == "__main__":
    sys.exit(main())
