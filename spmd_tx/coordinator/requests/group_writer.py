"""Writes requests and outcomes into the log in groups, each with one append to a file and one transaction.

The transaction also counts usage and adds audit events. Submissions are answered here once they are durable.
"""

import asyncio
import secrets
from collections.abc import Mapping, Sequence
from functools import partial
from typing import NamedTuple

import msgspec
from sqlalchemy import Executable
from sqlalchemy.orm import Session

from spmd_tx.coordinator.requests import image_rows, rows
from spmd_tx.coordinator.requests.completions import MICROSECONDS
from spmd_tx.coordinator.requests.payload_files import PayloadFiles
from spmd_tx.coordinator.requests.records import (
    BodyPlace,
    BodyRef,
    Failed,
    Finished,
    Known,
    NewOutcome,
    NewRow,
    Request,
    RequestKey,
    RequestKind,
)
from spmd_tx.coordinator.requests.runs import run_metrics
from spmd_tx.coordinator.requests.sample_notes import NoteWriter, owner_holder
from spmd_tx.coordinator.runtime import clock
from spmd_tx.coordinator.storage.database import Aside, Database
from spmd_tx.coordinator.storage.outages import OUTAGES
from spmd_tx.coordinator.tenancy import audit, usage
from spmd_tx.coordinator.tenancy.spent import Usage
from spmd_tx.coordinator.trajectories import turn_rows
from spmd_tx.coordinator.trajectories.turn_rows import OpenTurn
from spmd_tx.errors import Abandoned, InvalidRequest, Unavailable

AUDITED: dict[RequestKind, str] = {
    "save_weights": "checkpoint_saved",
    "save_weights_for_sampler": "checkpoint_saved",
    "save_weights_external": "checkpoint_saved",
    "load_weights": "checkpoint_loaded",
}


class Submission(NamedTuple):
    """Holds a request on its way into the log."""

    kind: RequestKind
    line: str
    seq_id: int
    session_id: str
    base: str | None  # as in Request
    payload: bytes
    also: Sequence[Executable]  # statements that become true together with the request
    refused: Failed | None  # the outcome of a refused request, which is only recorded
    images: Mapping[str, bytes]  # files to which the payload refers, by digest
    tokens: int  # that a sample takes at most
    accepted_at: float  # seconds since the epoch
    trace: str | None  # the client's, as W3C's traceparent
    accepted: asyncio.Future[str]  # its request_id, once it is durable

    @property
    def key(self) -> RequestKey:
        return self.line, self.seq_id


class WrittenGroup(NamedTuple):
    """Holds what has become durable."""

    fresh: list[tuple[Request, Submission]]  # submissions that were not in the log
    known: Mapping[RequestKey, Known]  # of all submissions
    unfinished: list[Request]  # all of the log's after an unsure commit; else none


class _WithPath(msgspec.Struct):
    """Reads the path from the result of a save or a load."""

    path: str | None = None  # null: a version without a name


class GroupWriter:
    """Writes one group after the other. A group that failed is written again, with others."""

    def __init__(self, database: Database, files: PayloadFiles, notes: NoteWriter, next_number: int) -> None:
        self._database = database
        self.files = files
        self._notes = notes
        self._next_number = next_number
        self._placed: dict[str, BodyRef] = {}  # results that are in files, but in no row yet
        self._is_unsure = False  # whether a commit that failed may still have happened

    async def write(self, submissions: Sequence[Submission], endings: Sequence[NewOutcome]) -> WrittenGroup:
        try:
            written = await self._database.write(partial(self._write, submissions, endings))
        except OUTAGES:
            self._is_unsure = True
            raise
        self._is_unsure = False
        for ending in endings:
            self._placed.pop(ending.request.id, None)
        return written

    def files_to_be(self) -> set[int]:
        """Numbers of files to which rows will refer once they can be written."""
        places = [place for place in self._placed.values() if isinstance(place, BodyPlace)]
        return {place.file for place in places} | self.files.open_numbers

    def _write(
        self, submissions: Sequence[Submission], endings: Sequence[NewOutcome], db: Session, aside: Aside
    ) -> WrittenGroup:
        known = rows.known(db, {each.key for each in submissions})
        unfinished = rows.unfinished(db) if self._is_unsure else []
        fresh = first_of_each_key(submissions, known)
        samples = [each.request.id for each in endings if each.request.kind == "sample"]
        turns = turn_rows.open_turns(db, samples)
        images = image_rows.of(db, [(each.session_id, each.images) for each in fresh])
        bodies = [*(each.payload for each in fresh), *images.new.values()]
        places = aside(lambda: self._write_bodies(bodies, endings, turns))
        new_rows = [
            NewRow(self._new_request(each), place, each.refused, each.accepted_at)
            for each, place in zip(fresh, places, strict=False)
        ]
        rows.append(db, new_rows)
        image_rows.append(db, images, places[len(fresh) :], [row.request.number for row in new_rows])
        sent = [usage.Item(each.line, each.session_id, Usage(images=len(each.images))) for each in fresh]
        usage.add(db, sent, clock.now())
        for statement in [statement for each in fresh for statement in each.also]:
            db.execute(statement)
        settled = [each._replace(result=self._result(each)) for each in endings]
        # A commit that seemed to fail may have counted some already.
        record(db, rows.without_outcome(db, settled) if self._is_unsure else settled)
        rows.settle(db, settled)
        for ending in endings:
            if (turn := turns.get(ending.request.id)) is not None:
                body = ending.outcome.body if isinstance(ending.outcome, Finished) else None
                turn_rows.settle(db, ending.request.id, turn, ending.completion / MICROSECONDS, body)
        requests = [row.request for row in new_rows]
        known |= {(each.line, each.seq_id): Known(each.id, each.kind) for each in requests}
        return WrittenGroup(list(zip(requests, fresh, strict=True)), known, unfinished)

    def _write_bodies(
        self, sent: Sequence[bytes], endings: Sequence[NewOutcome], turns: Mapping[str, OpenTurn]
    ) -> list[BodyRef]:
        """Write what clients sent, and results that were not written before; return where the first are."""
        results: dict[str, bytes] = {}
        for request, outcome, *_ in endings:
            if isinstance(outcome, Finished) and request.id not in self._placed:
                if outcome.notes:  # before the result: a client may train on a sample at once
                    turn = turns.get(request.id)
                    holder = request.session_id if turn is None else owner_holder(turn.owner)
                    self._notes.write(holder, request.id, outcome.notes)
                results[request.id] = outcome.body
        self._notes.finish()
        bodies = [*sent, *results.values()]
        places = self.files.write(bodies) if bodies else []
        self._placed |= zip(results, places[len(sent) :], strict=True)
        return places[: len(sent)]

    def _result(self, ending: NewOutcome) -> BodyRef | None:
        """Where the result is; None for a failure, which may have replaced a result that cannot be stored."""
        return self._placed.get(ending.request.id) if isinstance(ending.outcome, Finished) else None

    def _new_request(self, submission: Submission) -> Request:
        number, self._next_number = self._next_number, self._next_number + 1
        return Request(number, secrets.token_hex(16), *submission[:5])


def first_of_each_key(
    submissions: Sequence[Submission], known: Mapping[RequestKey, Known]
) -> list[Submission]:
    fresh: dict[RequestKey, Submission] = {}
    for submission in submissions:
        if submission.key not in known:
            fresh.setdefault(submission.key, submission)
    return list(fresh.values())


def answer(submission: Submission, known: Known) -> None:
    if known.kind == submission.kind:
        if not submission.accepted.done():  # it is done when the client has hung up
            submission.accepted.set_result(known.id)
        return
    line, seq_id = submission.key
    refuse(
        submission,
        InvalidRequest(
            f"seq_id {seq_id} of {line!r} was already used for {known.kind}; "
            f"send {submission.kind} with the next unused seq_id"
        ),
    )


def refuse(submission: Submission, error: InvalidRequest | Unavailable | Abandoned) -> None:
    if not submission.accepted.done():
        submission.accepted.set_exception(error)


def record(db: Session, settled: Sequence[NewOutcome]) -> None:
    """Count the usage, and add audit events and metrics, of outcomes that become durable now, each once."""
    items: list[usage.Item] = []
    run_metrics.add(db, settled)
    for each in settled:
        request, outcome = each.request, each.outcome
        if not isinstance(outcome, Finished):
            continue
        spent, event = outcome.spent, AUDITED.get(request.kind)
        path = None if event is None else msgspec.json.decode(outcome.body, type=_WithPath).path
        if event is not None and path is not None:
            audit.add_by_session(db, event, request.session_id, path)
            spent = spent._replace(checkpoints=int(event == "checkpoint_saved"))
        items.append(usage.Item(request.line, request.session_id, spent))
    usage.add(db, items, clock.now())
