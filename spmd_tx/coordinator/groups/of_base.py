"""The groups of one base model: which of them carries out a request, and samples that move between them."""

import asyncio
import logging
from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress
from hashlib import blake2b
from typing import NamedTuple, Protocol

import numpy as np

from spmd_tx.coordinator.groups.routing import Beginnings, GroupChoice, RoutedBecause, chosen, why
from spmd_tx.coordinator.groups.same_numbers import SameNumbers
from spmd_tx.coordinator.requests.queue import RequestQueue
from spmd_tx.coordinator.requests.records import Request, read_body
from spmd_tx.coordinator.runtime import metrics
from spmd_tx.coordinator.runtime.containment import contained
from spmd_tx.coordinator.sampling.version_store import VersionStore
from spmd_tx.coordinator.scheduler.sample_offer import SampleOffer
from spmd_tx.coordinator.scheduler.scheduler import Scheduler
from spmd_tx.coordinator.scheduler.siblings import Siblings
from spmd_tx.coordinator.wire.sampling import SampleRequest
from spmd_tx.errors import InvalidRequest

logger = logging.getLogger(__name__)

BEGINNING = 256  # tokens by which prompts that begin alike are known
ABANDONED_SECONDS = 60.0  # without workers, after which others try what may have ended them


class Member(Protocol):
    """What is used of a group."""

    @property
    def name(self) -> str: ...
    @property
    def trains(self) -> bool: ...
    @property
    def is_ready(self) -> bool: ...
    @property
    def scheduler(self) -> Scheduler: ...


class _Bound(NamedTuple):
    """Says which group draws a sample, for how many tokens others wait there because of it, and why there."""

    member: Member
    tokens: int
    why: RoutedBecause


class GroupsOfBase:
    """Holds what the groups of a base model share, and gives each request to one of them.

    What changes a model goes to the group that trains. Samples go to groups that only sample, as long as one
    is ready; they move when theirs is lost, with the tokens that are known.
    """

    def __init__(
        self, log: RequestQueue, roles: Sequence[tuple[str, bool]], store: VersionStore, numbers: SameNumbers
    ) -> None:
        """``roles`` are the names of the groups, and whether each trains."""
        trainers = [name for name, trains in roles if trains]
        samplers = [name for name, trains in roles if not trains]
        self._trainer, self._sampler = (trainers or samplers)[0], (samplers or trainers)[0]
        self._count = len(roles)
        self._log = log
        self.store = store
        self.siblings = Siblings(self._ran_dry)
        self.numbers = numbers
        self._members: list[Member] = []
        self._beginnings = Beginnings()
        self._moving: set[asyncio.Task[None]] = set()

    def add(self, member: Member) -> None:
        self._members.append(member)

    @property
    def schedulers(self) -> list[Scheduler]:
        return [member.scheduler for member in self._members]

    def can_do_without(self, name: str) -> bool:
        """Whether others go on with all that a group does."""
        return self._count > 1 and name != self._trainer

    def home(self, request: Request) -> str:
        """Return the name of the group that has a request as long as none is ready."""
        return self._sampler if request.kind == "sample" else self._trainer

    def holds(self, request: Request) -> bool:
        """Whether a group has a request already."""
        return any(scheduler.holds(request.id) for scheduler in self.schedulers)

    def group_of(self, request: Request) -> str:
        """Name the group that has a request, or that will have it."""
        if self._count > 1 and request.kind == "sample":
            for member in self._members:
                if member.scheduler.holds(request.id):
                    return member.name
        return self.home(request)

    def arrive(self, request: Request) -> None:
        """Give a new request to a group. One that is opened later finds it in the log."""
        if self._count == 1:
            self._members[0].scheduler.arrive(request)
        elif request.kind == "sample":
            bound = self._bound(request)
            metrics.ROUTED_SAMPLES.labels(bound.member.name, bound.why).inc()
            bound.member.scheduler.arrive(request, bound.tokens)
        else:
            for member in self._members:
                if member.name == self._trainer:
                    member.scheduler.arrive(request)

    def retire(self, samplers: Collection[str]) -> None:
        """Give up versions that were not used for long, and are not wanted now."""
        unused = [each for each in samplers if not any(one.draws_from(each) for one in self.schedulers)]
        for scheduler in self.schedulers:
            scheduler.retire(unused)

    # --- samples that move ----------------------------------------------------------------------------

    def ready(self, member: Member) -> None:
        """Let a group take samples, now that it has workers: those of groups without, and of the trainer."""
        for other in self._members:
            if other is member:
                continue
            if not other.is_ready or (other.trains and not member.trains):
                self._move(other, other.scheduler.movable(), "joined")
        if not member.trains:
            self._relieve(member, "joined")

    def _ran_dry(self) -> None:
        """Let groups that have no samples left take some of others, once what ended them is done."""
        if self._count > 1:
            asyncio.get_running_loop().call_soon(self._relieve_idle)

    def _relieve_idle(self) -> None:
        for member in self._members:
            if member.is_ready and not member.trains and not member.scheduler.has_samples:
                self._relieve(member, "idle")

    def _relieve(self, member: Member, reason: str) -> None:
        """Choose once more where the newer half of the longest line is drawn."""
        others = [each for each in self._members if each.is_ready and not each.trains and each is not member]
        if others:
            busiest = max(others, key=lambda each: each.scheduler.waiting_tokens)
            waiting = busiest.scheduler.movable()
            self._move(busiest, waiting[len(waiting) // 2 :], reason)

    def leaves(self, member: Member) -> None:
        """Let others begin what a group has not begun, whose workers will leave."""
        self._move(member, member.scheduler.movable(), "leaving")

    def lost(self, member: Member) -> None:
        """Let others go on with a group's samples, but for those that may have ended its workers."""
        if len(self._members) == 1:
            return
        self._move(member, member.scheduler.movable(), "lost")
        asyncio.get_running_loop().call_later(ABANDONED_SECONDS, self._look_after, member)

    def _move(
        self, member: Member, requests: Iterable[Request], reason: str, *, suspects: bool = False
    ) -> None:
        moved = 0
        if not any(each.is_ready for each in self._members if each is not member):
            return
        for request in requests:
            bound = self._bound(request)
            if bound.member is member:
                continue
            job = member.scheduler.hand_over(request)
            bound.member.scheduler.take_over(request, job, bound.tokens, is_suspect=suspects)
            moved += 1
        if moved:
            metrics.MOVED_SAMPLES.labels(reason).inc(moved)
            logger.info("%d samples of %s go on elsewhere", moved, member.name)

    def _look_after(self, member: Member) -> None:
        if not member.is_ready and member.scheduler.has_samples:
            moving = asyncio.create_task(self._move_suspects(member))
            self._moving.add(moving)
            moving.add_done_callback(self._moving.discard)

    async def _move_suspects(self, member: Member) -> None:
        """Let others try what may have ended a group's workers, which do not come back."""
        with contained(f"moving samples of {member.name}"):
            await member.scheduler.judge()
            if not member.is_ready:
                self._move(member, member.scheduler.samples(), "abandoned", suspects=True)

    # --- which group ----------------------------------------------------------------------------------

    def _bound(self, request: Request) -> _Bound:
        """Choose the group for a sample."""
        tokens = self._log.samples.tokens_of(request.id)
        able = [each for each in self._members if each.is_ready]
        if len(able) < 2:
            choices = [GroupChoice(each.trains, each.is_ready, SampleOffer()) for each in self._members]
            return _Bound(self._members[chosen(choices)], tokens, "only")
        prompt, now = self._prompt(request), asyncio.get_running_loop().time()
        begins = np.asarray(prompt[:BEGINNING], "<i4").tobytes()
        beginning = blake2b(request.line.encode() + b"\0" + begins, digest_size=16).digest()
        together = self._beginnings.group_of(beginning, now)
        choices = [
            GroupChoice(
                each.trains,
                each.is_ready,
                each.scheduler.offer(request, () if each.name == together else prompt),
            )
            for each in self._members
        ]
        index = chosen(choices)
        member, drawn = self._members[index], max(0, tokens - len(prompt))
        self._beginnings.note(beginning, member.name, now)
        because = why(choices, index)
        if because != "only" and member.name == together:
            because = "together"
        return _Bound(member, drawn + choices[index].offer.reading, because)

    def _prompt(self, request: Request) -> Sequence[int]:
        """Return the tokens of a sample's prompt, if its body is at hand.

        Its group decodes the body once more: decoded prompts of all that wait would take too much memory.
        """
        with suppress(InvalidRequest):
            if (body := self._log.body_at_hand(request)) is not None:
                return read_body(body, SampleRequest).prompt.token_ids
        return []
