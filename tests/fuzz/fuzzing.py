"""One run of the fuzzer: odd requests beside a bystander, kills, restarts, and everything that may not be."""

import re
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.fuzz.alice import RANK, TOLERANCE, Alice, Note, differences
from tests.fuzz.mallory import Book, Mallory
from tests.fuzz.served import Prober, Served

SETTLE_SECONDS = 150  # for one answer, when nothing new is sent; a gap of numbers is waited for
STORIES_AT_ONCE, ROUNDS_AT_ONCE = 8, 4  # of mallory, and of alice meanwhile
# What may stand in the log at the level of errors.
ALLOWED = (
    "the database or the disk failed: (sqlite3.OperationalError) database is locked",
    "grammar.compiler:try_outside ended by signal",  # as the grammar was too much
    "the server ended while it was working on request",  # as it was killed
)


@dataclass
class Result:
    """Of a run."""

    seed: int
    book: Book
    notes: list[Note]
    findings: list[str] = field(default_factory=list)
    rounds: int = 0  # that she has had
    figures: dict[str, object] = field(default_factory=dict)

    def problems(self, expected: list[Note], tolerance: float = TOLERANCE, most: int = 25) -> list[str]:
        """The first of all that may not be; she was to be told what she is told in peace."""
        if not self.findings:
            self.findings += differences(expected, self.notes, tolerance)[:3]
            if len(self.notes) != len(expected):
                self.findings.append(f"she has {len(self.notes)} notes instead of {len(expected)}")
        return [finding[:6000] for finding in [*self.findings, *self.book.findings][:most]]

    def __str__(self) -> str:
        figures = ", ".join(f"{name} {value}" for name, value in self.figures.items())
        return f"FUZZ_SEED={self.seed}: {figures}"


def in_peace(served: Served, rounds: int, rank: int = RANK) -> list[Note]:
    """What the bystander is told when she is alone."""
    assert served.start(), served.log.read_text()[-5000:]
    alice = Alice(served.url, served.tokens["alice"], rounds, rank)
    alice.finish_rounds()
    alice.run()
    assert alice.errors == [], alice.errors
    return alice.notes


class Run:
    """Stories in parts beside a bystander, with a kill -9 and a start after each part."""

    def __init__(
        self, served: Served, folder: Path, seed: int, rounds: int | None = None, rank: int = RANK
    ) -> None:
        self._served = served
        book = Book(folder / "requests.log")
        self.result = Result(seed, book, [])
        self._mallory = Mallory((served.url, served.tokens["mallory"]), seed, book, served.is_alive, rank)
        self._alice = Alice(served.url, served.tokens["alice"], rounds, rank)
        self._prober = Prober(served)

    def go(self, parts: Iterable[Sequence[int]]) -> Result:
        """Play stories part by part; after each part, kill the server and start it again."""
        began = time.monotonic()
        if self._started():
            self._alice.start()
            self._prober.start()
            if all(self._play(part) and self._goes_on() for part in parts):
                self._settle()
            self._prober.end()
            self._alice.leave()
        self._conclude(time.monotonic() - began)
        return self.result

    def _play(self, stories: Sequence[int]) -> bool:
        """Whether the server has survived them."""
        for place in range(0, len(stories), STORIES_AT_ONCE):
            if not self._served.is_alive():
                break
            self._alice.allow(ROUNDS_AT_ONCE)
            self._mallory.play(stories[place : place + STORIES_AT_ONCE])
        return self._has_survived()

    def _goes_on(self) -> bool:
        """Whether it does after a kill."""
        if not self._restarted():
            return False
        self._mallory.finish_sessions()
        return True

    def _settle(self) -> None:
        """When nothing new is sent, everything comes to an end."""
        self._alice.finish_rounds()
        self._alice.join_while_told(SETTLE_SECONDS, self._served.is_alive)
        if not self._has_survived():
            return
        if self._alice.is_alive():
            self.result.findings.append(f"alice is still at note {len(self._alice.notes)}")
        self._mallory.settle(SETTLE_SECONDS)
        if self._has_survived():
            generation = self._served.metric('spmd_tx_generation{group="main"}')
            if generation != len(self._served.starts):
                self.result.findings.append(f"workers were lost: this is generation {generation:.0f}")

    def _has_survived(self) -> bool:
        if self._served.is_alive():
            return True
        what = "hung" if self._served.has_hung else "died"
        report = f"the server {what}. {self.result.book.last_calls()}\n{self._end_of_log()}"
        self.result.findings.append(report)
        return False

    def _restarted(self) -> bool:
        self._prober.is_paused.set()
        self._served.kill()
        if not self._started():
            return False
        self._prober.is_paused.clear()
        return True

    def _started(self) -> bool:
        if self._served.start():
            return True
        self.result.findings.append(f"the server does not start\n{self._end_of_log()}")
        return False

    def _end_of_log(self) -> str:
        return self._served.log.read_text(errors="replace")[-4000:]

    def _conclude(self, seconds: float) -> None:
        result, alice, book = self.result, self._alice, self.result.book
        result.notes, result.rounds = alice.notes, alice.rounds
        result.findings += [f"alice was told: {error}" for error in alice.errors]
        result.findings += errors_in(self._served.log.read_text(errors="replace"))
        result.figures = {
            "seconds": round(seconds),
            "requests": book.sent,
            "statuses": dict(sorted(book.statuses.items())),
            "futures": dict(sorted(book.outcomes.items())),
            "alice's notes": len(alice.notes),
            "her longest wait/s": round(alice.longest_wait, 1),
            "her refusals": alice.refusals,
            "longest silence of /healthz/s": round(self._prober.longest, 2),
            "starts/s": [round(each, 1) for each in self._served.starts],
            "503": dict(book.unavailable),
        }


def errors_in(log: str) -> list[str]:
    """Entries at the level of errors, each with the end of what follows it; of many alike, one."""
    entries = re.split(r"^(?=\d\d:\d\d:\d\d [A-Z]+ )", log, flags=re.MULTILINE)
    errors = [entry for entry in entries if re.match(r"\S+ (ERROR|CRITICAL) ", entry)]
    wrong = [each for each in errors if not any(words in each for words in ALLOWED)]
    by_end = {each.rstrip().rpartition("\n")[2]: each for each in wrong}
    return [f"in the log: {each[:200]} ...\n{each[-800:]}" for each in by_end.values()]
