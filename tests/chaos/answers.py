"""Reads what the clients of a run were told, and compares it with another run."""

import json
import subprocess
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tests.chaos import finals, tenants
from tests.chaos.tenants import Tenant

PROGRAM = Path(__file__).with_name("program.py")
ERRORS = ("error", "log")


@dataclass(frozen=True)
class Answers:
    """Holds all that the tenants have noted, each in its order."""

    notes: dict[str, list[tuple[str, Any]]]
    times: list[float]  # of all of them, ascending

    @property
    def errors(self) -> list[str]:
        return [str(value) for notes in self.notes.values() for what, value in notes if what in ERRORS]

    @property
    def longest_pause(self) -> float:
        """Return the longest time without an answer, in seconds."""
        return float(np.diff(self.times).max())

    @property
    def seconds(self) -> float:
        return self.times[-1] - self.times[0]

    @property
    def finals(self) -> list[dict[str, Any]]:
        return [
            value for tenant in sorted(self.notes) for what, value in self.notes[tenant] if what == "final"
        ]

    def count(self, what: str) -> int:
        return sum(name == what for notes in self.notes.values() for name, _ in notes)


class Program:
    """Runs tenants in their own process, which survives everything; ``prefix`` is its command's start."""

    def __init__(
        self,
        url: str,
        folder: Path,
        seed: int,
        rounds: int,
        prefix: Sequence[str] = (),
        who: Sequence[Tenant] = tenants.ALL,
    ) -> None:
        self._path = folder / "record.jsonl"
        self._path.touch()
        command = [*prefix, sys.executable, "-W", "ignore::FutureWarning", str(PROGRAM)]
        command += [url, str(folder), str(seed), str(rounds), *(tenant.__name__ for tenant in who)]
        self._log = (folder / "program.log").open("w")
        self.process = subprocess.Popen(command, stdout=self._log, stderr=self._log)

    def progress(self) -> int:
        """Count the answers so far."""
        return self._path.read_bytes().count(b"\n")

    def is_over(self) -> bool:
        return self.process.poll() is not None

    def answers(self, check: Callable[[], None]) -> Answers:
        """Wait for its end, checking the cluster meanwhile, and return the answers."""
        while not self.is_over():
            check()
            time.sleep(0.05)
        return read(self._path)

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        self._log.close()


def read(path: Path) -> Answers:
    notes: dict[str, list[tuple[str, Any]]] = defaultdict(list)
    times: list[float] = []
    for line in path.read_text().splitlines():
        note = json.loads(line)
        notes[note["tenant"]].append((note["what"], note["value"]))
        times.append(note["at"])
    return Answers(dict(notes), times)


def differences(one: Answers, other: Answers) -> Counter[str]:
    """Count the answers of each kind that differ or are missing."""
    found: Counter[str] = Counter()
    for tenant in one.notes.keys() | other.notes.keys():
        left, right = one.notes.get(tenant, []), other.notes.get(tenant, [])
        found[f"{tenant}: number of answers"] += abs(len(left) - len(right))
        for (what, expected), (_, value) in zip(left, right, strict=False):
            found[f"{tenant}: {what}"] += not _is_same(what, expected, value)
    return +found


def final_differences(one: Answers, one_data: Path, other: Answers, other_data: Path) -> Counter[str]:
    """Count the arrays of the final states and weights that differ in any bit."""
    found: Counter[str] = Counter()
    found["missing"] = abs(len(one.finals) - len(other.finals))
    for expected, value in zip(one.finals, other.finals, strict=False):
        for kind, digests in (("state", finals.state_digests), ("weights", finals.weight_digests)):
            left = digests(one_data / "checkpoints", expected[kind])
            right = digests(other_data / "checkpoints", value[kind])
            found[kind] += len(left.items() ^ right.items()) // 2 + (left.keys() != right.keys())
    return +found


def miscounted_steps(answers: Answers, data_dir: Path) -> list[str]:
    """Return the final states with more or fewer updates than their tenant asked for."""
    return [
        f"{final['state']}: {seen} updates instead of {final['steps']}"
        for final in answers.finals
        if (seen := finals.steps_of(data_dir / "checkpoints", final["state"])) != final["steps"]
    ]


def _is_same(what: str, expected: Any, value: Any) -> bool:
    if what == "final":  # where it lies differs; what it holds is compared by final_differences
        return expected["steps"] == value["steps"]
    return expected == value
