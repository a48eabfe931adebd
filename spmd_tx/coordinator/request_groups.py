"""Writes requests and outcomes into the log in groups: one write to a file and one transaction for each."""

import secrets
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from sqlalchemy.orm import Session

from spmd_tx.coordinator import accounting, request_log
from spmd_tx.coordinator.payloads import PayloadFiles
from spmd_tx.coordinator.request_records import (
    Finished,
    Kept,
    Key,
    Known,
    NewRow,
    Outcome,
    Place,
    Request,
    Settled,
)
from spmd_tx.coordinator.request_times import RequestTimes
from spmd_tx.coordinator.sample_notes import NoteWriter
from spmd_tx.coordinator.storage.database import Aside, Database
from spmd_tx.coordinator.storage.outages import OUTAGES
from spmd_tx.coordinator.submissions import Submission, first_of_each_key, known_as


class Ending(NamedTuple):
    """An outcome that is to be stored."""

    request: Request
    outcome: Outcome
    times: RequestTimes
    completion: int  # its number


class Group(NamedTuple):
    """What is written together."""

    submissions: Sequence[Submission]
    endings: Sequence[Ending]


class Written(NamedTuple):
    """What has become durable."""

    fresh: list[tuple[Request, Submission]]  # those that were not in the log
    known: Mapping[Key, Known]  # of all submissions
    unfinished: list[Request]  # all in the log, if it was not sure what is; else none


class GroupWriter:
    """Writes one group after the other. A group that failed is written again, with others."""

    def __init__(self, database: Database, files: PayloadFiles, notes: NoteWriter, next_number: int) -> None:
        self._database = database
        self._files = files
        self._notes = notes
        self._next_number = next_number
        self._placed: dict[str, Kept] = {}  # results that were written, but are in no row yet
        self._is_unsure = False  # whether a commit that failed may still have happened

    async def write(self, group: Group) -> Written:
        try:
            written = await self._database.write(lambda db, aside: self._write(group, db, aside))
        except OUTAGES:
            self._is_unsure = True
            raise
        self._is_unsure = False
        for ending in group.endings:
            self._placed.pop(ending.request.id, None)
        return written

    def files_to_be(self) -> set[int]:
        """Numbers of files to which rows will refer once they can be written."""
        places = [place for place in self._placed.values() if isinstance(place, Place)]
        return {place.file for place in places} | self._files.open_numbers

    def _write(self, group: Group, db: Session, aside: Aside) -> Written:
        known = request_log.known(db, {each.key for each in group.submissions})
        unfinished = request_log.unfinished(db) if self._is_unsure else []
        fresh = first_of_each_key(group.submissions, known)
        places = aside(lambda: self._write_bodies(fresh, group.endings))
        rows = [
            NewRow(self._new_request(each), place, each.refused, each.accepted_at)
            for each, place in zip(fresh, places, strict=True)
        ]
        request_log.append(db, rows)
        for statement in [statement for each in fresh for statement in each.also]:
            db.execute(statement)
        settled = [Settled(*each[:2], self._result(each), *each[2:]) for each in group.endings]
        # What a commit that seemed to fail has counted is not counted again.
        accounting.record(db, request_log.without_outcome(db, settled) if self._is_unsure else settled)
        request_log.settle(db, settled)
        requests = [row.request for row in rows]
        known |= {(each.line, each.seq_id): known_as(each) for each in requests}
        return Written(list(zip(requests, fresh, strict=True)), known, unfinished)

    def _write_bodies(self, submissions: Sequence[Submission], endings: Sequence[Ending]) -> list[Kept]:
        """Write payloads, and those results that were not written yet: where the payloads are."""
        results: dict[str, bytes] = {}
        for request, outcome, *_ in endings:
            if isinstance(outcome, Finished) and request.id not in self._placed:
                if outcome.notes:  # before the result: who knows a sample may train on it at once
                    self._notes.write(request.session_id, request.id, outcome.notes)
                results[request.id] = outcome.body
        self._notes.finish()
        bodies = [*(each.payload for each in submissions), *results.values()]
        places = self._files.write(bodies) if bodies else []
        self._placed |= zip(results, places[len(submissions) :], strict=True)
        return places[: len(submissions)]

    def _result(self, ending: Ending) -> Kept | None:
        """Where it is; one that could not be stored may have been replaced by a failure."""
        return self._placed.get(ending.request.id) if isinstance(ending.outcome, Finished) else None

    def _new_request(self, submission: Submission) -> Request:
        number, self._next_number = self._next_number, self._next_number + 1
        _, line, seq_id, session_id = submission[:4]
        return Request(number, secrets.token_hex(16), submission.kind, line, seq_id, session_id)
