"""Notices hanging workers: silent ones, and commands and programs past their deadlines. Has no clock."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from spmd_tx.coordinator.mesh.loss_causes import LossSign, Suspicion
from spmd_tx.protocol.reports import BEAT_SECONDS, AnyReport, Beat, Progress

SILENT_SECONDS = 15.0  # without a sign of life, after which a worker or an agent counts as lost
HELLO_SECONDS = 120.0  # from the start of a process to its first sign: Python, JAX and devices have to start

# If more has passed, the coordinator itself has slept, and reports of that time wait to be read.
LONGEST_STEP = 2 * BEAT_SECONDS


@dataclass
class _Worker:
    silent: float = 0.0  # seconds
    has_spoken: bool = False
    executing: int | None = None  # the number of a command, as of its last beat


@dataclass
class Watchdog:
    """Watches the workers of one generation."""

    workers: int
    command_timeout: float  # seconds
    _watched: list[_Worker] = field(init=False)
    _age: float = 0.0  # of the command that is carried out
    _oldest: int | None = None  # the number of that command; None: nothing is sent
    _compiling: dict[int, float] = field(default_factory=dict)  # ages of orders of programs, by number
    _is_ready: bool = False

    def __post_init__(self) -> None:
        self._watched = [_Worker() for _ in range(self.workers)]

    def heard(self, report: AnyReport) -> None:
        """Note a worker's sign of life."""
        worker = self._watched[report.process]
        worker.silent, worker.has_spoken = 0.0, True
        if isinstance(report, Beat):
            worker.executing = report.sequence
        elif isinstance(report, Progress) and not self._is_ready:
            self._age = 0.0  # the start makes progress

    def ready(self) -> None:
        self._is_ready, self._age = True, 0.0

    def passed(
        self, seconds: float, oldest: int | None, compiling: Mapping[int, str] | None = None
    ) -> list[LossSign]:
        """Add the seconds that have passed, and return the signs of loss that they reveal.

        ``oldest`` is the number of the command that is being executed, None for no command; ``compiling`` has
        the programs that are being compiled, by the numbers of their orders.
        """
        seconds = min(seconds, LONGEST_STEP)
        signs = []
        for number, worker in enumerate(self._watched):
            worker.silent += seconds
            limit = SILENT_SECONDS if worker.has_spoken else HELLO_SECONDS
            if worker.silent > limit:
                text = f"worker {number} has given no sign of life for {limit:g} s"
                signs.append(LossSign(Suspicion.SILENT, number, text, False, worker.executing))
        signs += self._deadline(seconds, oldest)
        signs += self._deadlines_of_programs(seconds, compiling or {})
        return signs

    def _deadline(self, seconds: float, oldest: int | None) -> list[LossSign]:
        if self._is_ready and (oldest != self._oldest or oldest is None):
            self._oldest, self._age = oldest, 0.0
        else:
            self._age += seconds
        if self._age <= self.command_timeout:
            return []
        what = "no reply to a command" if self._is_ready else "the workers did not get ready"
        text = f"{what} within --command-timeout {self.command_timeout:g} s"
        return [LossSign(Suspicion.LATE, 0, text, by_command=self._is_ready, sequence=oldest)]

    def _deadlines_of_programs(self, seconds: float, compiling: Mapping[int, str]) -> list[LossSign]:
        ages = {number: self._compiling.get(number, -seconds) + seconds for number in compiling}
        self._compiling = ages
        signs = []
        for number, age in ages.items():
            if age > self.command_timeout:
                limit = f"--command-timeout {self.command_timeout:g} s"
                text = f"{compiling[number]} was not compiled within {limit}"
                signs.append(LossSign(Suspicion.LATE, 0, text, by_command=True, orders=[number]))
        return signs
