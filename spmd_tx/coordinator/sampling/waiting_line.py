"""The line of sample requests that have samples to start: round robin over samplers, FIFO within each."""

from bisect import bisect_left, insort

from spmd_tx.coordinator.sampling.job import SampleJob


class WaitingLine:
    """Holds jobs with waiting samples, by sampler. The sampler that was served longest ago comes first."""

    def __init__(self) -> None:
        self._jobs: dict[str, list[tuple[int, int, SampleJob]]] = {}
        self._places: dict[SampleJob, int] = {}
        self._last_place = 0
        self._ahead: dict[SampleJob, int] | None = None  # None: the line has changed since it was counted

    def __bool__(self) -> bool:
        return bool(self._places)

    def samplers(self) -> list[str]:
        """Return the samplers in the order of their turns."""
        return list(self._jobs)

    def jobs(self, sampler: str, most: int) -> list[SampleJob]:
        """Return a sampler's first ``most`` jobs in order."""
        return [job for _, _, job in self._jobs.get(sampler, [])[:most]]

    def ahead_of(self, job: SampleJob) -> int:
        """Return how many samples of earlier requests wait, too."""
        if self._ahead is None:
            self._ahead, total = {}, 0
            for other in sorted(self._places, key=lambda each: each.number):
                self._ahead[other] = total
                total += len(other.waiting)
        return self._ahead.get(job, 0)

    def add(self, job: SampleJob) -> None:
        """Put a job in line by its age, unless it is there."""
        if job not in self._places:
            self._insert(job, 0)

    def remove(self, job: SampleJob) -> None:
        """Take a job out, if it is there."""
        place = self._places.pop(job, None)
        if place is None:
            return
        self._ahead = None
        jobs = self._jobs[job.sampler]
        del jobs[bisect_left(jobs, (place, job.number), key=lambda entry: entry[:2])]
        if not jobs:
            del self._jobs[job.sampler]

    def step_back(self, job: SampleJob) -> None:
        """Let all other requests of the job's sampler go first."""
        self.remove(job)
        self._last_place += 1
        self._insert(job, self._last_place)

    def serve(self, sampler: str) -> None:
        """Move a sampler that had its turn to the end."""
        jobs = self._jobs.pop(sampler, None)
        if jobs is not None:
            self._jobs[sampler] = jobs

    def _insert(self, job: SampleJob, place: int) -> None:
        self._ahead = None
        self._places[job] = place
        insort(self._jobs.setdefault(job.sampler, []), (place, job.number, job), key=lambda entry: entry[:2])
