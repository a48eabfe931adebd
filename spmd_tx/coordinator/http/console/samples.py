"""Routes that show what a run has sampled: prompts and answers as text, and the samples of one prompt.

They read the log of requests, so they show what the server keeps of it. What they read, and what they answer
with, is bounded, however long prompts and answers are.
"""

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from litestar import Controller, Response
from litestar.di import NamedDependency, Provide
from litestar.params import FromPath, FromQuery

from spmd_tx.coordinator.catalog.listings import MAX_OFFSET
from spmd_tx.coordinator.http.answer_guard import polled
from spmd_tx.coordinator.http.services import ApiCall
from spmd_tx.coordinator.requests.rows import not_kept
from spmd_tx.coordinator.requests.runs import sample_log
from spmd_tx.coordinator.requests.runs.curve_columns import CurveAxis
from spmd_tx.coordinator.requests.runs.sample_bodies import (
    Part,
    SampleAnswer,
    SampleBody,
    ShownSize,
    WantedSamples,
)
from spmd_tx.coordinator.requests.runs.sample_log import Logged, SampleRange
from spmd_tx.coordinator.storage.tables import ModelRow, SamplerRow
from spmd_tx.coordinator.wire.console.run_samples import (
    Excerpt,
    PromptImage,
    SampledRequest,
    SampleGroup,
    SampleOfGroup,
    SampleOrder,
    SamplesPage,
    ShortSample,
    TokenizedText,
)
from spmd_tx.errors import InvalidRequest, NotFound
from spmd_tx.images.headers import MEDIA_TYPES, read_header

OF_IMAGES = {  # which tenants have sent: nothing in them may run
    "X-Content-Type-Options": "nosniff",
    "Content-Security-Policy": "default-src 'none'; sandbox",
    "Cache-Control": "private, max-age=3600",
}
MOST_REQUESTS = 50  # of a page
MOST_LOOKED_AT = 200  # requests, in a search
MOST_ERRORS = 32  # of a group
DIGITS = 4  # of log-probabilities
ANY = WantedSamples()

EXCERPT = ShownSize(prompt=(0, 160), sample=(96, 0), samples=8)  # what a page shows of each request
WHOLE = ShownSize(prompt=(1024, 3072), sample=(1536, 512), samples=32)  # shown of a group, and searched


class _CurvePoint(NamedTuple):
    """Names a point of a curve."""

    metric: str
    axis: CurveAxis
    x: float  # steps, or seconds since the first point of the run


class _SampleChoice(NamedTuple):
    """Says which samples of a run are wanted."""

    search: str  # a text that they have; empty: any
    point: _CurvePoint | None  # before which they were asked for; None: all
    prompt_of: str | None  # ID of a request whose prompt they have; None: any
    order: SampleOrder


def _choice(
    search: FromQuery[str] = "",
    metric: FromQuery[str | None] = None,
    axis: FromQuery[CurveAxis] = "step",
    x: FromQuery[float | None] = None,
    prompt_of: FromQuery[str | None] = None,
    order: FromQuery[SampleOrder] = "newest",
) -> _SampleChoice:
    if (metric is None) != (x is None):
        raise InvalidRequest("send metric and x together, or neither")
    point = None if metric is None or x is None else _CurvePoint(metric, axis, x)
    return _SampleChoice(search, point, prompt_of, order)


class SamplesController(Controller):
    path = "/console/api/runs"

    @polled("/{run_id:str}/samples", dependencies={"choice": Provide(_choice, sync_to_thread=False)})
    async def samples(
        self,
        run_id: FromPath[str],
        call: ApiCall,
        choice: NamedDependency[_SampleChoice],
        limit: FromQuery[int] = 20,
        start: FromQuery[int | None] = None,
    ) -> SamplesPage:
        """List what a run has sampled, newest first; with ``search``, what has this text in it.

        With ``metric`` and ``x`` it begins with what was asked for before that point of a curve, and with
        ``prompt_of`` it is what has the prompt of that request. The orders by advantage have only what the
        run was trained on.
        """
        model = await call.model(run_id)
        most = min(max(limit, 1), MOST_REQUESTS)
        start = None if start is None else min(max(start, 0), MAX_OFFSET)

        async def answer() -> SamplesPage:
            curves, point = call.services.curves, choice.point
            until = None if point is None else await curves.moment(model.id, *point)
            return await _Reader(call, model).page(choice, until, start, most)

        key = "samples", call.caller.owner, call.caller.role, model.id, start, most, choice
        return await call.services.shared_answers.get_costly(key, answer)

    @polled("/{run_id:str}/samples/{request_id:str}")
    async def group(self, run_id: FromPath[str], request_id: FromPath[str], call: ApiCall) -> SampleGroup:
        """Return the samples of a request, and of others with the same prompt, token by token."""
        model = await call.model(run_id)
        return await _Reader(call, model).group(request_id)

    @polled("/{run_id:str}/samples/{request_id:str}/images/{number:int}")
    async def image(
        self, run_id: FromPath[str], request_id: FromPath[str], number: FromPath[int], call: ApiCall
    ) -> Response[bytes]:
        """Return an image of a prompt, as it was sent."""
        model = await call.model(run_id)
        content = await _Reader(call, model).image(request_id, number)
        media_type = MEDIA_TYPES[read_header(content).format]
        return Response(content, media_type=media_type, headers=OF_IMAGES)


class _SampleOfRequest(NamedTuple):
    """Holds an answer, and its place in its request."""

    logged: Logged
    place: int
    answer: SampleAnswer


class _Reader:
    """Reads samples for one answer."""

    def __init__(self, call: ApiCall, model: ModelRow) -> None:
        self._services, self._caller, self._model = call.services, call.caller, model
        base = call.services.bases.of_row(model.base_model)
        self._texts, self._samples = base.prompt_texts, call.services.samples.of(base)
        self._steps: dict[str, int | None] = {}  # by sampler

    async def page(
        self, choice: _SampleChoice, until: float | None, start: int | None, most: int
    ) -> SamplesPage:
        """Return a page of what is chosen, and was accepted until a time in seconds since the epoch."""
        wanted, similar_to = await self._wanted(choice)
        to_look_at = most if wanted == ANY else MOST_LOOKED_AT
        which = SampleRange(start if choice.order == "newest" else None, until, similar_to)
        found = await self._in_order(choice.order, which, start or 0, to_look_at + 1)
        requests = [logged for _, logged in found]
        places, looked_at = range(len(requests[:most])), len(requests[:most])
        if wanted != ANY and requests:
            stored = [*map(sample_log.stored, requests[:to_look_at])]
            places, looked_at = await self._samples.search(stored, wanted, most, WHOLE)
        shown = [requests[place] for place in places]
        size = EXCERPT if choice.order == "newest" else EXCERPT._replace(samples=WHOLE.samples)
        bodies = await self._samples.read([*map(sample_log.stored, shown)], size)
        if len(bodies) < len(shown):  # reading the others would take too long
            shown, looked_at = shown[: len(bodies)], places[len(bodies) - 1] + 1
        next_start = None if looked_at == len(requests) else found[looked_at - 1][0]
        found_bodies = zip(shown, bodies, strict=True)
        drawn = [(each, body) for each, body in found_bodies if body is None or not body.only_scores]
        hours = self._services.config.keep_results_hours
        return SamplesPage(await self._listed(drawn, choice.order), looked_at, next_start, hours)

    async def _wanted(self, choice: _SampleChoice) -> tuple[WantedSamples, int | None]:
        """Return what is looked for, and the length of the body of the request whose prompt is wanted."""
        if choice.prompt_of is None:
            return WantedSamples(choice.search), None
        async with self._services.database.reading() as db:
            logged = await sample_log.one(db, self._model, self._caller, choice.prompt_of)
        (body,) = await self._samples.read([sample_log.stored(logged)], EXCERPT)
        if body is None:
            raise not_kept(choice.prompt_of)
        return WantedSamples(choice.search, body.digest), logged.row.payload_length

    async def _in_order(
        self, order: SampleOrder, which: SampleRange, start: int, most: int
    ) -> list[tuple[int, Logged]]:
        """Return requests, each with where a page begins that goes on behind it."""
        samples = sample_log.in_range(self._model, self._caller, which)
        async with self._services.database.reading() as db:
            if order == "newest":
                return await sample_log.newest(db, samples, most)
            rollouts = self._services.queue.rollouts
            ids = await rollouts.by_advantage(self._model.id, highest=order == "highest")
            found = await sample_log.in_order(db, samples, ids[start:], most)
        return [(start + place + 1, logged) for place, logged in found]

    async def group(self, request_id: str) -> SampleGroup:
        async with self._services.database.reading() as db:
            logged = await sample_log.one(db, self._model, self._caller, request_id)
            beside = await sample_log.neighbours(db, logged)
        # The request itself comes first, then what is near: time may end before all are read.
        nearest = sorted(beside, key=lambda each: abs(each.row.number - logged.row.number))
        bodies = await self._samples.read([*map(sample_log.stored, nearest)], WHOLE, alike=True)
        body = bodies[0]
        if body is None:
            raise not_kept(request_id)
        same = [(each, other) for each, other in zip(nearest, bodies, strict=False) if other is not None]
        samples, left_out, errors = list[_SampleOfRequest](), 0, list[str]()
        for each, other in sorted(same, key=lambda pair: pair[0].row.number):
            if each.row.error is not None:
                errors.append(each.row.error)
            samples += [_SampleOfRequest(each, place, answer) for place, answer in enumerate(other.answers)]
            left_out += other.num_answers - len(other.answers)
        parts = [body.prompt, *(answer.content for _, _, answer in samples)]
        texts = await self._texts.pieces([part.tokens for part in parts])
        prompt, *contents = (_with_texts(*each) for each in zip(parts, texts, strict=True))
        return SampleGroup(
            model=_model(logged.sampler),
            weights=weights(logged.sampler),
            steps=await self._steps_of(logged.sampler),
            prompt=prompt,
            temperature=body.params.temperature,
            top_p=body.params.top_p,
            top_k=body.params.top_k,
            max_tokens=body.params.max_tokens,
            samples=[self._sample(*each) for each in zip(samples, contents, strict=True)],
            left_out=left_out,
            not_read=len(nearest) - len(bodies),
            errors=errors[:MOST_ERRORS],
            images=[
                PromptImage(number, each.tokens, each.width, each.height, each.size)
                for number, each in enumerate(body.images)
            ],
        )

    async def image(self, request_id: str, number: int) -> bytes:
        """Read an image of a prompt. Raises NotFound."""
        async with self._services.database.reading() as db:
            logged = await sample_log.one(db, self._model, self._caller, request_id)
        (body,) = await self._samples.read([sample_log.stored(logged)], EXCERPT)
        if body is None or not 0 <= number < len(body.images):
            raise NotFound(f"request {request_id!r} has no image {number}, or it is no longer kept")
        images = self._services.images
        key = await images.key(logged.row.session_id, body.images[number].digest)
        return (await images.read(key)).content

    async def _listed(
        self, drawn: Sequence[tuple[Logged, SampleBody | None]], order: SampleOrder
    ) -> list[SampledRequest]:
        tokens, answers = list[list[int]](), list[list[_SampleOfRequest]]()
        for logged, body in drawn:
            answers.append([] if body is None else self._answers(logged, body, order))
            if body is not None:
                tokens += [body.prompt.tokens, *(each.answer.content.tokens for each in answers[-1])]
        texts = iter(await self._texts.decode(tokens))
        shown = zip(drawn, answers, strict=True)
        return [await self._shown(logged, body, of_it, texts) for (logged, body), of_it in shown]

    def _answers(self, logged: Logged, body: SampleBody, order: SampleOrder) -> list[_SampleOfRequest]:
        """Return the answers of a request that a page shows, in an order."""
        answers = [_SampleOfRequest(logged, place, answer) for place, answer in enumerate(body.answers)]
        known = self._services.queue.rollouts.advantages(self._model.id, logged.row.id)
        sign = -1.0 if order == "highest" else 1.0
        if order != "newest":
            answers.sort(key=lambda each: sign * known.get(each.place, sign * math.inf))
        return answers[: EXCERPT.samples]

    async def _shown(
        self,
        logged: Logged,
        body: SampleBody | None,
        answers: Sequence[_SampleOfRequest],
        texts: Iterator[str],
    ) -> SampledRequest:
        """Describe a request, whose texts are the next ones: the prompt's, then those of the answers."""
        row = logged.row
        return SampledRequest(
            id=row.id,
            number=row.number,
            group=row.id if body is None else body.group,
            at=row.finished_at or 0.0,
            weights=weights(logged.sampler),
            steps=await self._steps_of(logged.sampler),
            prompt=None if body is None else _excerpt(next(texts), body.prompt),
            temperature=1.0 if body is None else body.params.temperature,
            samples=[
                ShortSample(
                    _excerpt(next(texts), answer.content),
                    answer.stop_reason,
                    _rounded(answer.mean_logprob),
                    self._advantage(row.id, place),
                )
                for _, place, answer in answers
            ],
            num_samples=0 if body is None else body.num_answers,
            error=row.error,
        )

    def _sample(self, sample: _SampleOfRequest, content: TokenizedText) -> SampleOfGroup:
        (row, _), place, answer = sample
        at, mean = row.finished_at or 0.0, _rounded(answer.mean_logprob)
        advantage = self._advantage(row.id, place)
        return SampleOfGroup(row.id, place, at, answer.stop_reason, mean, advantage, content)

    def _advantage(self, request_id: str, place: int) -> float | None:
        known = self._services.queue.rollouts.advantages(self._model.id, request_id)
        return _rounded(known.get(place))

    async def _steps_of(self, sampler: SamplerRow) -> int | None:
        if sampler.id not in self._steps:
            async with self._services.database.reading() as db:
                self._steps[sampler.id] = await sample_log.steps(db, sampler)
        return self._steps[sampler.id]


def weights(sampler: SamplerRow) -> str | None:
    """Name what a sampler draws from: a checkpoint, or a version of a run's weights; None: the base model."""
    if sampler.model_path is not None:
        return sampler.model_path
    if sampler.model_id is None:
        return None
    return "newest weights" if sampler.inflight else f"version {sampler.id.rpartition(':')[2]}"


def _model(sampler: SamplerRow) -> str:
    if sampler.model_path is not None:
        return sampler.model_path
    return sampler.base_model if sampler.model_id is None else sampler.id


def _with_texts(part: Part, texts: list[str]) -> TokenizedText:
    logprobs = None if part.logprobs is None else [_rounded(each) for each in part.logprobs]
    return TokenizedText(part.tokens, texts, logprobs, part.left_out, part.left_out_at)


def _excerpt(text: str, part: Part) -> Excerpt:
    return Excerpt(text, part.length, part.left_out > 0)


def _rounded(value: float | None) -> float | None:
    return None if value is None or not math.isfinite(value) else round(value, DIGITS)
