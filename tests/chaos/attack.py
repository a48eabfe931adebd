"""Attacks a cluster while clients use it: a seeded schedule of kills and cuts."""

import random
import time
from collections import Counter
from collections.abc import Callable, Sequence

from tests.chaos import points
from tests.chaos.answers import Program
from tests.chaos.cluster import ROLES, Cluster

COORDINATOR_POINTS = (
    "row.before",  # a request is about to be written down
    "payload.after",  # its body is in a file, its row not yet there
    "row.after",  # it is durable, the client has not heard of it
    "command.before",
    "command.after",
    "result.before",  # the reply is there, its outcome not yet stored
    "result.after",
    "checkpoint.before",  # the folder is written, but not yet in its place
    "checkpoint.after",
    "snapshot.before",  # the files are complete, but not yet known of
    "snapshot.after",
)
WORKER_POINTS = (
    "forward_backward.before",
    "forward_backward.during",
    "forward_backward.after",
    "optim_step.before",
    "optim_step.during",
    "optim_step.after",
    "decode.during",
    "save_state.during",
    "save_sampler.during",
    "load_state.during",
    "snapshot.during",
    "writing.before",  # of a snapshot in the background
    "writing.during",
    "writing.after",
)
POINTS = (*COORDINATOR_POINTS, *(f"{worker}.{point}" for worker in ("w0", "w1") for point in WORKER_POINTS))
# A version that is torn: on its way from those who train to those who sample.
PUBLISHING_POINTS = (
    "w0.save_sampler.during",
    "w0.config.before",  # the folder is half written
    "w0.place.before",  # it is complete, but not yet in its place
    "w0.place.after",  # it is there, and the coordinator does not know
    "written.before",
    "written.after",
    "sampler.load_sampler.before",
    "sampler.load_sampler.during",
    "sampler.load_sampler.after",
    "sampler.decode.during",
)
POINTS_OF_IMAGES = (
    "image_row.before",  # a request with an image is about to be written down
    "image_row.after",  # both are durable, and nothing is decoded
    "image.before",
    "image.after",  # it is decoded, and no command has it
    "image_command.after",  # EncodeImages is sent, and the command that reads is not
    "w0.encode_images.before",
    "w0.encode_images.during",
    "w1.encode_images.after",  # its tokens are on the devices, and nobody has read them
    "w0.forward_backward.during",
    "w1.decode.during",
)
POINTS_OF_DRAFTS = (
    "draft.after",  # one was right, and its sample does not have it yet
    "w0.read_ahead.before",
    "w0.read_ahead.during",
    "w0.read_ahead.after",
    "w1.read_ahead.during",
    "w1.read_ahead.after",  # the other worker may have replied
)
POINT_SECONDS = 6.0  # until a point that nobody passes is given up
STUCK_SECONDS = 120.0  # without any answer to a client
DATABASE = "database"


class Attack:
    """Kills processes until there were enough kills, waiting for some progress in between."""

    def __init__(self, cluster: Cluster, program: Program, seed: int, deadline: float) -> None:
        self._cluster = cluster
        self._program = program
        self._deadline = deadline  # on the monotonic clock
        self._random = random.Random(seed)
        self._points = [*POINTS]
        self._random.shuffle(self._points)
        self.kills: Counter[str] = Counter()
        self.cuts: Counter[str] = Counter()
        self.leavings = 0  # of replicas that were told to end

    def run(self, kills: int, kill_database: Callable[[], None] | None) -> None:
        """Kill until enough processes were killed, or the clients are done."""
        while self.kills.total() < kills and not self._is_over():
            self._wait_for_progress(self._random.randint(1, 6))
            self._strike(kill_database)
            for _ in range(self._random.choice([1, 1, 2])):  # while it recovers
                self._pause(self._random.uniform(0.05, 3.0))
                self._kill("while it recovered", self._random.choice(ROLES))

    def kill_each(
        self, roles: Sequence[str], times: int, kill_database: Callable[[], None] | None = None
    ) -> None:
        """Kill every process, and the database, so many times, in random order."""
        targets = [*roles, *([DATABASE] * bool(kill_database))] * times
        self._random.shuffle(targets)
        for target in targets:
            self._wait_for_progress(self._random.randint(2, 5))
            self._pause(self._random.uniform(0.0, 0.3))
            if target == DATABASE and kill_database is not None:
                kill_database()
                self.kills[target] += 1
                continue
            before = self.kills[target]
            while self.kills[target] == before and not self._is_over():
                self._kill(target, target)
                self._pause(0.05)

    def kill_at_each(self, points: Sequence[str], leaving: Sequence[str] = ()) -> None:
        """Kill a process at every named point, in random order; between them one of ``leaving`` leaves."""
        for point in self._random.sample(points, len(points)):
            while not self.kills[point] and not self._is_over():
                self._wait_for_progress(self._random.randint(2, 5))
                self._kill_at(point)
            if leaving:
                self._wait_for_progress(1)
                self.leavings += self._cluster.let_leave(self._random.choice(leaving))

    def _is_over(self) -> bool:
        return self._program.is_over() or time.monotonic() > self._deadline

    def _strike(self, kill_database: Callable[[], None] | None) -> None:
        kinds = (
            ["point"] * 8
            + ["role"] * 3
            + ["all", "all", "cut link", "cut clients"]
            + ["database"] * bool(kill_database)
        )
        match self._random.choice(kinds):
            case "point":
                self._kill_at(self._next_point())
            case "role":
                self._pause(self._random.uniform(0, 0.5))
                self._kill("any time", self._random.choice(ROLES))
            case "all":
                self._kill("all", *self._random.sample(ROLES, len(ROLES)))
            case "cut link":
                self._cut("agent's network", self._cluster.link.cut, self._cluster.link.heal)
            case "cut clients":
                self._cut("clients' network", self._cluster.clients.cut, self._cluster.clients.heal)
            case "database":
                assert kill_database is not None
                kill_database()
                self.kills[DATABASE] += 1

    def _next_point(self) -> str:
        point = self._points.pop()
        self._points.insert(0, point)
        return point

    def _kill_at(self, point: str) -> None:
        points.arm(self._cluster.points, point, self._random.randint(1, 3))
        until = time.monotonic() + POINT_SECONDS
        while (self._cluster.points / point).exists() and time.monotonic() < until and not self._is_over():
            time.sleep(0.01)
        if points.disarm(self._cluster.points, point):
            self.kills[point] += 1

    def _kill(self, why: str, *roles: str) -> None:
        self.kills[why] += self._cluster.kill(*roles)

    def _cut(self, what: str, cut: Callable[[], None], heal: Callable[[], None]) -> None:
        cut()
        self._pause(self._random.choice([0.0, 0.5, 3.0]))
        heal()
        self.cuts[what] += 1

    def _wait_for_progress(self, answers: int) -> None:
        wanted, until = self._program.progress() + answers, time.monotonic() + STUCK_SECONDS
        while self._program.progress() < wanted and not self._is_over():
            self._cluster.check()
            assert time.monotonic() < until, f"no client had an answer for {STUCK_SECONDS:.0f} s"
            time.sleep(0.02)

    def _pause(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while time.monotonic() < until and not self._is_over():
            time.sleep(0.01)
