"""Keeps what was found of a case in a file beside its HLO."""

from pathlib import Path

import msgspec

from spmd_tx.worker.aot.report import ProgramReport

NAME = "reports.json"


class Reports(msgspec.Struct, frozen=True, kw_only=True):
    """Holds what was found of a case."""

    case: str
    programs: dict[str, ProgramReport]  # by role


def write_reports(folder: Path, found: Reports) -> None:
    """Write what was found beside a case's HLO. Roles that were not compiled this time keep what they had."""
    path = folder / NAME
    before = msgspec.json.decode(path.read_bytes(), type=Reports).programs if path.exists() else {}
    path.write_bytes(msgspec.json.encode(Reports(case=found.case, programs=before | found.programs)))


def read_reports(folder: Path) -> dict[str, Reports]:
    """Return the reports of all cases in a folder, by the name of the case."""
    found = [msgspec.json.decode(path.read_bytes(), type=Reports) for path in folder.glob(f"*/{NAME}")]
    return {each.case: each for each in found}
