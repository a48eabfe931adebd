"""Compiles the server's programs for accelerators, and compares what they need and do with budgets.toml.

    python -m tests.aot.check tpu [--only qwen3-4b] [--roles decode,train] [--write]

A miss names program, budget and what was found. A known miss is a budget that is not met yet, with the value
of today: that one must not get worse. ``--write`` replaces the values of today in the file.
"""

import argparse
import sys
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from spmd_tx.models.config import read_model_config
from spmd_tx.models.declared.model import Model
from tests.support.model_shapes import REAL as REAL_MODELS

FILE = Path(__file__).with_name("budgets.toml")
FIGURES = (
    *("memory", "sorts", "copies", "layer_copies", "flops", "bytes_moved", "launches"),
    *("collectives", "collective_bytes"),
)
ROLES = (
    *("train", "prefill", "decode", "optim_step"),  # of usual sizes
    *("largest train", "largest prefill", "continued prefill", "widest decode"),  # that need most memory
    *("short train", "dimuon_step", "copy_pages", "copy_states", "encode 1024", "encode 4096"),
    *("decode beside a chunk", "small decode", "speculative decode"),
)
LARGEST = {"train": "largest train", "prefill": "largest prefill", "decode": "widest decode"}
# With which names of programs begin
BY_NAME = (
    *("dimuon_step", "copy_pages", "copy_states", "continued prefill", "encode 1024", "encode 4096"),
    *("decode beside a chunk", "small decode", "speculative decode"),
)
USUAL_ADAPTERS = 8
# The same source and versions give the same programs, but for the order in which XLA tries things.
TOLERANCE = 1.01
CONFIGS = Path(__file__).with_name("configs")  # of models whose sizes are not all that declares them


class NotCompiled(Exception):
    """Says that a program of a case cannot be compiled, or that there is none for a role."""


@dataclass(frozen=True)
class Case:
    """Holds a model on a mesh, and the budgets of its programs by role."""

    model: str
    devices: str
    mesh: tuple[int, int, int]
    context: int
    budgets: Mapping[str, "Budget"]
    adapters: int = USUAL_ADAPTERS  # slots for training, and for sampling
    base_dtype: str = "auto"
    speculation: str = "off"

    @property
    def name(self) -> str:
        fewer = "" if self.adapters == USUAL_ADAPTERS else f" adapters={self.adapters}"
        base = "" if self.base_dtype == "auto" else f" base-dtype={self.base_dtype}"
        speculation = "" if self.speculation == "off" else f" speculation={self.speculation}"
        where = f"{self.devices} {','.join(map(str, self.mesh))}"
        return f"{self.model} {where} {self.context}{fewer}{base}{speculation}"

    @property
    def is_tpu(self) -> bool:
        return ":" in self.devices


@dataclass(frozen=True)
class Budget:
    """Holds the most of each figure, and what is found today where that is more."""

    most: Mapping[str, float]
    known: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Line:
    """Compares one figure of one program with its budget."""

    case: str
    program: str
    figure: str
    found: float
    most: float
    known: float | None  # None: the budget was met

    @property
    def verdict(self) -> str:
        if self.found <= self.most * TOLERANCE:
            return "met" if self.known is None else "met now, so no longer a known miss"
        if self.known is None:
            return "MISSED"
        return "known miss" if self.found <= self.known * TOLERANCE else "WORSE than the known miss"

    @property
    def is_failure(self) -> bool:
        return self.verdict.isupper() or self.verdict.startswith("WORSE")

    def __str__(self) -> str:
        before = "" if self.known is None else f", {_shown(self.known)} before"
        return (
            f"{self.case}, {self.program}: {self.figure} {_shown(self.found)}, budget {_shown(self.most)}"
            f"{before}: {self.verdict}"
        )


def model_named(name: str, base_dtype: str = "auto", speculation: str = "off") -> Model:
    """Return a model that cases name: by its sizes, or from a config.json. Raises StartError."""
    known = REAL_MODELS.get(name) if base_dtype == "auto" else None
    return known or read_model_config(CONFIGS / name, base_dtype=base_dtype, speculation=speculation)


def read(text: str) -> list[Case]:
    """Read budgets. Raises ValueError for figures and roles that do not exist."""
    return [_case(name, roles) for name, roles in tomllib.loads(text).items()]


def _case(name: str, roles: Mapping[str, Any]) -> Case:
    model, devices, mesh, context, *others = name.split()
    options = dict(other.split("=") for other in others)
    budgets = {}
    for role, figures in roles.items():
        most = dict(figures)
        known = most.pop("known", {})
        unknown = [figure for figure in (*most, *known) if figure not in FIGURES]
        if unknown or role not in ROLES or not known.keys() <= most.keys():
            raise ValueError(f"{name}, {role}: {unknown or 'not a role, or a known miss without a budget'}")
        budgets[role] = Budget(most, known)
    fsdp, ep, tp = map(int, mesh.split(","))
    adapters = int(options.pop("adapters", USUAL_ADAPTERS))
    base_dtype = options.pop("base-dtype", "auto")
    speculation = options.pop("speculation", "off")
    if options:
        raise ValueError(f"{name}: {' '.join(options)} is not an option of a case")
    sizes = (fsdp, ep, tp), int(context)
    return Case(model, devices, *sizes, budgets, adapters, base_dtype, speculation)


def write(cases: Sequence[Case], found: Mapping[str, Mapping[str, Mapping[str, float]]], text: str) -> str:
    """Return the file with the values of today: known misses where a budget is not met, none where it is."""
    head = text[: text.index("\n[")] if "\n[" in text else text
    parts = [head.rstrip()]
    for case in cases:
        for role, budget in case.budgets.items():
            today = found.get(case.name, {}).get(role)
            known = dict(budget.known)
            if today is not None:
                known = {
                    figure: today[figure]
                    for figure, most in budget.most.items()
                    if today[figure] > most * TOLERANCE
                }
            lines = [f'["{case.name}"."{role}"]']
            lines += [f"{figure} = {_number(value)}" for figure, value in budget.most.items()]
            lines += [f"known.{figure} = {_number(value)}" for figure, value in known.items()]
            parts.append("\n".join(lines))
    return "\n\n".join(parts) + "\n"


def compare(case: Case, found: Mapping[str, Mapping[str, float]]) -> Iterator[Line]:
    """Yield a line for each budget. ``found`` has the figures of each role."""
    for role, figures in found.items():
        budget = case.budgets[role]
        for figure, most in budget.most.items():
            yield Line(case.name, role, figure, figures[figure], most, budget.known.get(figure))


def figures_of(report: Any) -> dict[str, float]:
    """Return the figures of a program's report. Memory is in units of what is planned."""
    whole = [each for each in report.copies if not each.array.startswith("one layer")]
    return {
        "memory": report.memory_bytes / report.planned_bytes if report.planned_bytes else 0.0,
        "sorts": report.sorts,
        "copies": sum(each.count for each in whole),
        "layer_copies": sum(each.count for each in report.copies) - sum(each.count for each in whole),
        "flops": report.flops,
        "bytes_moved": report.bytes_moved,
        "launches": report.launches,
        "collectives": sum(each.count for each in report.collectives),
        "collective_bytes": sum(each.bytes for each in report.collectives),
    }


def by_role(programs: Sequence[Any]) -> dict[str, Any]:
    """Return the programs that have a role; one may have several."""
    second = "continued", "decode beside"
    main = [each for each in programs if each.wanted.kind != "other" and not each.name.startswith(second)]
    found = {each.wanted.kind: each for each in main if each.wanted.is_usual and each.wanted.kind in ROLES}
    for each in programs:
        role = next((role for role in BY_NAME if each.name.startswith(role)), None)
        found |= {role: each} if role else {}
    for kind, role in LARGEST.items():
        same = [each for each in main if each.wanted.kind == kind]
        found |= {role: max(same, key=lambda each: each.wanted.planned)} if same else {}
    training = [each for each in main if each.wanted.kind == "train"]
    found |= {"short train": min(training, key=lambda each: each.wanted.shape.row_length)} if training else {}
    return found


def compile_case(case: Case, roles: Sequence[str], hlo: Path | None) -> dict[str, dict[str, float]]:
    """Return the figures of each role that has a budget. Raises NotCompiled."""
    from spmd_tx.cli.compile import plan_for
    from spmd_tx.config import ServerConfig
    from spmd_tx.protocol.programs import ProgramShape
    from spmd_tx.worker.aot.compile import compile_programs, programs_of
    from spmd_tx.worker.aot.programs import WantedProgram
    from spmd_tx.worker.aot.target import answering_for, target_for
    from spmd_tx.worker.memory.accelerators import parse_devices
    from tests.aot.reports import Reports, write_reports

    config = ServerConfig(
        base_model=case.model,
        max_context_length=case.context,
        max_lora_adapters=case.adapters,
        sampler_slots=case.adapters,
        base_dtype=case.base_dtype,
        speculation=case.speculation,
    ).with_mesh(case.mesh)
    devices = parse_devices(case.devices, None)
    model = model_named(case.model, case.base_dtype, case.speculation)
    plan = plan_for(config, model, devices)
    target = target_for(plan, devices)
    wanted = [role for role in case.budgets if not roles or role in roles]
    # Dimuon takes minutes to compile for a mixture, so plans leave it out.
    dimuon = WantedProgram("dimuon_step", "optim_step", ProgramShape(step="dimuon_step"))
    more = [each for each in (dimuon, _beside_a_chunk(plan), _small_decode(plan)) if each.name in wanted]
    programs = by_role(programs_of(plan, target.mesh, more=more))
    programs = {role: program for role, program in programs.items() if role in wanted}
    missing = set(wanted) - programs.keys()
    if missing:
        raise NotCompiled(f"{case.name} has no program for {', '.join(sorted(missing))}")
    folder = None if hlo is None else hlo / case.name.replace(" ", "_").replace(":", "_")
    reports: dict[str, Any] = {}
    with answering_for(devices):
        unique = list({program.name: program for program in programs.values()}.values())
        for report in compile_programs(plan, target, unique, _say, folder):
            if report.error is not None:
                raise NotCompiled(f"{case.name}, {report.name} could not be compiled: {report.error}")
            reports |= {role: report for role, each in programs.items() if each.name == report.name}
            _say(f"  {report.compile_seconds:.0f} s, roofline {1e3 * report.roofline_seconds:.2f} ms")
    if folder is not None and reports:
        write_reports(folder, Reports(case=case.name, programs=reports))
    return {role: figures_of(report) for role, report in reports.items()}


def _beside_a_chunk(plan: Any) -> Any:
    """Return the decode of usual rows that reads a chunk of a prompt, too, if the plan knows any."""
    from spmd_tx.protocol.commands import PREFILL_TOKENS
    from spmd_tx.protocol.programs import ProgramShape
    from spmd_tx.worker.aot.programs import WantedProgram

    sizes, rows = plan.sizes, plan.rows_of_decode
    return WantedProgram(
        "decode beside a chunk",
        "decode",
        ProgramShape(step="decode", rows=rows, active=1, chunk=PREFILL_TOKENS),
        planned=plan.steps.decode(plan.decode_rows, sizes.widest_table, sizes.chunk_part),
        tokens=rows,
    )


def _small_decode(plan: Any) -> Any:
    """Return the decode of as many rows as may speculate, without drafts."""
    from spmd_tx.protocol.programs import ProgramShape
    from spmd_tx.worker.aot.programs import AHEAD_ROWS, WantedProgram

    rows = AHEAD_ROWS * plan.sizes.data_shards
    return WantedProgram(
        "small decode",
        "decode",
        ProgramShape(step="decode", rows=rows, active=1),
        planned=plan.steps.decode(AHEAD_ROWS, plan.sizes.widest_table),
        tokens=rows,
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("platform", choices=("tpu", "cuda"))
    parser.add_argument("--only", default="", help="words that a case's name must have, as qwen3-4b")
    parser.add_argument("--roles", default="", help=f"some of: {', '.join(ROLES)}")
    parser.add_argument("--write", action="store_true", help="write the values of today into the file")
    parser.add_argument(
        "--hlo",
        type=Path,
        help="folder for the optimized HLO and the reports that page.py reads",
    )
    options = parser.parse_args()
    cases = read(FILE.read_text())
    chosen = [
        case
        for case in cases
        if case.is_tpu == (options.platform == "tpu")
        and all(word in case.name for word in options.only.split())
    ]
    if not chosen:
        parser.error("no case has these words")
    from spmd_tx.worker.aot import environment
    from spmd_tx.worker.memory.accelerators import parse_devices

    found: dict[str, dict[str, dict[str, float]]] = {}
    lines: list[Line] = []
    broken: list[str] = []
    roles = [role for role in options.roles.split(",") if role]
    for case in chosen:
        devices = parse_devices(case.devices, None)
        environment.check(devices)
        environment.prepare(devices)
        _say(case.name)
        try:
            found[case.name] = compile_case(case, roles, options.hlo)
        except NotCompiled as problem:  # the other cases are looked at all the same
            broken.append(str(problem))
            continue
        of_case = list(compare(case, found[case.name]))
        lines += of_case
        print("\n".join(map(str, of_case)), flush=True)
        if options.write:
            now = read(FILE.read_text())  # the other platform's run may have written meanwhile
            FILE.write_text(write(now, found, FILE.read_text()))
    failures = [line for line in lines if line.is_failure]
    known = sum(line.verdict == "known miss" for line in lines)
    print(f"\n{len(lines)} budgets, {known} known misses, {len(failures) + len(broken)} failures")
    for line in (*broken, *failures):
        print(line)
    return 1 if broken or (failures and not options.write) else 0


def _number(value: float) -> str:
    return str(int(value)) if value == int(value) and abs(value) < 1e6 else f"{value:.4g}"


def _shown(value: float) -> str:
    return f"{value:,.0f}" if value == int(value) and abs(value) < 1e6 else f"{value:.4g}"


def _say(message: str) -> None:
    print(message, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
