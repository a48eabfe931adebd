"""Requests on their way into the log, and what their senders are told."""

import asyncio
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from sqlalchemy import Executable

from spmd_tx.coordinator.request_records import Failed, Key, Kind, Known, Request
from spmd_tx.errors import Abandoned, InvalidRequest, Unavailable


class Submission(NamedTuple):
    """A request on its way into the log."""

    kind: Kind
    line: str
    seq_id: int
    session_id: str
    payload: bytes
    also: Sequence[Executable]  # statements that become true together with the request
    refused: Failed | None  # the outcome of a request that is only recorded
    tokens: int  # that a sample takes at most
    accepted_at: float  # seconds since the epoch
    accepted: asyncio.Future[str]  # its request_id, once it is durable

    @property
    def key(self) -> Key:
        return self.line, self.seq_id


def first_of_each_key(submissions: Sequence[Submission], known: Mapping[Key, Known]) -> list[Submission]:
    fresh: dict[Key, Submission] = {}
    for submission in submissions:
        if submission.key not in known:
            fresh.setdefault(submission.key, submission)
    return list(fresh.values())


def known_as(request: Request) -> Known:
    return Known(request.id, request.kind)


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
