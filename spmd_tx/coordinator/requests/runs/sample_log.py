"""Finds the sample requests of a training run in the log, and reads what they asked and what they got."""

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Literal, NamedTuple

import msgspec
import numpy as np
from sqlalchemy import Select, and_, func, or_, select
from sqlalchemy.ext.asyncio import AsyncSession

from spmd_tx.coordinator.requests import rows
from spmd_tx.coordinator.requests.payload_files import read_body
from spmd_tx.coordinator.requests.runs import run_metrics
from spmd_tx.coordinator.storage.tables import Model, RequestRow, RunMetrics, Sampler, Session
from spmd_tx.coordinator.tenancy.callers import Caller, is_seen
from spmd_tx.coordinator.wire import sampling_protobuf
from spmd_tx.coordinator.wire.sampling import SampleRequest, SamplingParams
from spmd_tx.coordinator.wire.sampling_protobuf import SampledSequence
from spmd_tx.errors import DamagedBody

MOST_BYTES = 16 << 20  # of a body on disk, beyond which it is not read
NEIGHBOURS = 256  # numbers on both sides of a request, among which others of its prompt are looked for
SIMILAR_BYTES = 64  # by which the bodies of two requests with one prompt may differ in length


class Logged(NamedTuple):
    """Holds the row of a request, and the sampler that it went to."""

    row: RequestRow
    sampler: Sampler


class Size(NamedTuple):
    """Says how much of a request is kept in memory: tokens of the beginning and of the end, and samples."""

    prompt: tuple[int, int]
    sample: tuple[int, int]
    samples: int


@dataclass(frozen=True)
class Part:
    """Holds tokens, without the middle where there are too many."""

    tokens: list[int]
    logprobs: list[float] | None  # nats, of each of these tokens
    left_out: int  # tokens that are not here
    left_out_at: int  # place before which these stand

    @property
    def length(self) -> int:
        """The tokens of the whole."""
        return len(self.tokens) + self.left_out


@dataclass(frozen=True)
class Answer:
    """Holds one sample."""

    content: Part
    stop_reason: Literal["stop", "length"]
    mean_logprob: float | None  # nats, of the whole; None: it has no tokens


@dataclass(frozen=True)
class Body:
    """Holds what a request asked and what it got."""

    group: str  # the same for requests of one prompt to one sampler
    prompt: Part
    params: SamplingParams
    answers: list[Answer]  # the first ones
    num_answers: int


async def of_run(
    db: AsyncSession, model: Model, caller: Caller, before: int | None, most: int
) -> Sequence[Logged]:
    """Return the newest ended requests that were accepted before the one with a number, newest first."""
    query = _of_run(model, caller).order_by(RequestRow.number.desc()).limit(most)
    if before is not None:
        query = query.where(RequestRow.number < before)
    return [Logged(*found) for found in await db.execute(query)]


async def one(db: AsyncSession, model: Model, caller: Caller, request_id: str) -> Logged | None:
    """Return a request of a run, if it has ended."""
    found = (await db.execute(_of_run(model, caller).where(RequestRow.id == request_id))).first()
    return None if found is None else Logged(*found)


async def neighbours(db: AsyncSession, of: Logged) -> Sequence[Logged]:
    """Return the requests to the same sampler that may have the same prompt, and the request itself."""
    row = of.row
    length = row.payload_length
    query = select(RequestRow).where(
        RequestRow.line == row.line,
        RequestRow.kind == row.kind,
        RequestRow.finished_at.is_not(None),
        RequestRow.number.between(row.number - NEIGHBOURS, row.number + NEIGHBOURS),
        RequestRow.payload_length.between(length - SIMILAR_BYTES, length + SIMILAR_BYTES),
    )
    found = (await db.scalars(query.order_by(RequestRow.number))).all()
    return [Logged(each, of.sampler) for each in found]


async def steps(db: AsyncSession, sampler: Sampler) -> int | None:
    """Return how many steps an ephemeral version was trained; None: it is none, or follows its model."""
    if sampler.model_id is None or sampler.inflight:
        return None
    query = select(func.count()).select_from(RunMetrics)
    is_step = RunMetrics.line == sampler.model_id, RunMetrics.kind == run_metrics.OPTIM_STEP
    return await db.scalar(query.where(*is_step, RunMetrics.at <= sampler.created_at)) or 0


def _of_run(model: Model, caller: Caller) -> "Select[RequestRow, Sampler]":
    """Select by the weights: those of the run, wherever it was sampled, and the base model beside it."""
    is_base = Sampler.model_id.is_(None), Sampler.model_path.is_(None)
    return (
        select(RequestRow, Sampler)
        .join(Sampler, Sampler.id == RequestRow.line)
        .join(Session, Session.id == RequestRow.session_id)
        .where(
            RequestRow.kind == "sample",
            RequestRow.finished_at.is_not(None),
            is_seen(caller, Session.owner),
            or_(
                Sampler.model_id == model.id,
                Sampler.model_path.startswith(f"tinker://{model.id}/", autoescape=True),
                and_(Sampler.session_id == model.session_id, *is_base),
            ),
        )
    )


def read(payloads: Path, row: RequestRow, size: Size) -> Body | None:
    """Read the bodies of a request; None: they are not kept, or too large to show. Blocks.

    A failed request has no answers.
    """
    result = rows.result_of(row)
    if row.payload_length > MOST_BYTES or (row.result_length or 0) > MOST_BYTES:
        return None
    try:
        asked = msgspec.json.decode(read_body(payloads, rows.payload_of(row)), type=SampleRequest)
        got = b"" if result is None else read_body(payloads, result)
    except DamagedBody:
        return None
    prompt = [token for chunk in asked.prompt.chunks for token in chunk.tokens or ()]
    digest = blake2b(np.asarray(prompt, np.int32).tobytes(), digest_size=8)
    digest.update(row.line.encode())
    samples = sampling_protobuf.decode_sample_response(got)
    return Body(
        digest.hexdigest(),
        _part(prompt, None, size.prompt),
        asked.sampling_params,
        [_answer(sample, size.sample) for sample in samples[: size.samples]],
        len(samples),
    )


def _answer(sample: SampledSequence, ends: tuple[int, int]) -> Answer:
    mean = float(np.mean(sample.logprobs)) if sample.logprobs else None
    return Answer(_part(sample.tokens, sample.logprobs, ends), sample.stop_reason, mean)


def _part(tokens: Sequence[int], logprobs: Sequence[float] | None, ends: tuple[int, int]) -> Part:
    first, last = ends
    left_out = max(0, len(tokens) - first - last)
    behind = slice(first + left_out, None)
    return Part(
        [*tokens[:first], *tokens[behind]],
        None if logprobs is None else [*logprobs[:first], *logprobs[behind]],
        left_out,
        min(first, len(tokens)),
    )
