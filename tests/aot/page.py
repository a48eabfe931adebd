"""Puts what check.py has found into docs/performance.md, one line for each usual program of a case.

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
from tests.bench import tables

PAGE = Path(__file__).parents[2] / "docs" / "performance.md"
MARK = "make aot"
ROLES = ("train", "prefill", "decode")
HEADER = (
    *("model", "devices", "mesh (fsdp, ep, tp)", "program, per data shard"),
    *("TFLOP", "GB moved", "roofline, ms", "tokens/s at most"),
)


def lines(cases: Sequence[Case], found: dict[str, Reports]) -> list[list[str]]:
    """Return the lines of the table, in the order of the cases."""
    return [
        _line(case, found[case.name].programs[role])
        for case in cases
        for role in ROLES
        if case.name in found and role in found[case.name].programs
    ]


def _line(case: Case, program: ProgramReport) -> list[str]:
    return [
        case.model,
        case.devices.replace("x", " x ", 1) if not case.is_tpu else case.devices,
        ", ".join(map(str, case.mesh)),
        program.name,
        f"{program.flops / 1e12:.3g}",
        f"{program.bytes_moved / 1e9:.3g}",
        f"{1e3 * program.roofline_seconds:.3g}",
        f"{program.tokens_per_second:,.0f}",
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="what was given to check.py as --hlo")
    folder = parser.parse_args().folder
    cases, found = read(FILE.read_text()), read_reports(folder)
    missing = [case.name for case in cases if case.name not in found]
    if missing:
        parser.error(f"{folder} has nothing of {'; '.join(missing)}")
    tables.publish(PAGE, MARK, tables.markdown(HEADER, lines(cases, found)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
