"""Knows which samples wait for which programs."""

from spmd_tx.coordinator.mesh.program_orders import ProgramOrders, ProgramRequest
from spmd_tx.coordinator.sampling.job import SampleJob
from spmd_tx.protocol.programs import ProgramShape


class MissingPrograms:
    """Holds the programs that samples lack in one generation of workers."""

    def __init__(self, orders: ProgramOrders) -> None:
        self._orders = orders
        self._to_read: dict[SampleJob, list[ProgramShape]] = {}  # to start, or to go on with a prefill
        self._to_draw: dict[SampleJob, ProgramShape] = {}  # of those that the last Decode left out

    def __contains__(self, job: SampleJob) -> bool:
        """Whether a request lacked programs when its prompt was planned last."""
        return job in self._to_read

    def note(self, job: SampleJob, programs: list[ProgramShape]) -> None:
        """Note what a request lacks to read its prompt."""
        if programs:
            self._to_read[job] = programs
        else:
            self._to_read.pop(job, None)

    def note_left_out(self, programs: dict[SampleJob, ProgramShape]) -> None:
        """Note what those lack that a Decode leaves out."""
        self._to_draw = programs

    def forget(self, job: SampleJob) -> None:
        self._to_read.pop(job, None)
        self._to_draw.pop(job, None)

    def of(self, job: SampleJob) -> list[ProgramShape]:
        """Return what a request waits for now."""
        programs = [*self._to_read.get(job, ()), *([self._to_draw[job]] if job in self._to_draw else [])]
        return [program for program in programs if not self._orders.is_ready(program)]

    def reason(self, job: SampleJob) -> str | None:
        """Say which program a request waits for; None: for none."""
        programs = self.of(job)
        return self._orders.reason(programs[0]) if programs else None

    def requests(self) -> list[ProgramRequest]:
        """Return what all of them wait for."""
        return [
            ProgramRequest(program, job.session, job.request_id)
            for job in self._to_read | self._to_draw
            for program in self.of(job)
        ]
