"""Makes the job of a sample request, with the seeds of its samples. Pure."""

from dataclasses import dataclass, field
from hashlib import blake2b

from spmd_tx.coordinator.images.pool import ImagePool
from spmd_tx.coordinator.sampling.bank import VersionKey
from spmd_tx.coordinator.sampling.job import Sample, SampleJob
from spmd_tx.coordinator.sampling.request import prompt_scores
from spmd_tx.coordinator.sampling.request.row_settings import row_settings
from spmd_tx.coordinator.sampling.request.stops import Decoder, StopWatch, stop_rule
from spmd_tx.coordinator.sampling.request.validation import most_drawn
from spmd_tx.coordinator.wire.sampling import SampleRequest
from spmd_tx.models.declared.model import Model

OF_SESSION = ":sample:"  # separates a session's id from the number of its sampler
OF_THE_PROMPT = -1  # in place of a sample's index: draws for the tokens of the prompt


@dataclass(frozen=True)
class SamplingModel:
    """Holds what a sample request needs to know of the model."""

    config: Model
    max_context: int  # tokens
    decoder: Decoder | None  # None: stop strings cannot be used
    eos_token_ids: tuple[int, ...] = ()  # what ends a sample when the request names no stop
    batch_invariant: bool = False
    images: ImagePool = field(default_factory=ImagePool)  # on the devices


def make_job(
    request_id: str, number: int, body: SampleRequest, version: VersionKey, model: SamplingModel
) -> SampleJob:
    """Make the job of a validated request."""
    params, sampler = body.sampling_params, body.sampling_session_id or version
    prompt = body.prompt.token_ids
    room = most_drawn(len(prompt), model.max_context)
    vocab_size = model.config.vocab_size
    job = SampleJob(
        request_id=request_id,
        number=number,
        version=version,
        sampler=sampler,
        session=sampler.rpartition(OF_SESSION)[0],
        prompt=prompt,
        images=body.prompt.images,
        max_tokens=room if params.max_tokens is None else max(1, min(params.max_tokens, room)),
        rule=stop_rule(params.stop, model.eos_token_ids),
        scoring=prompt_scores.of(
            body, len(prompt), vocab_size, draw_seeds(params.seed, request_id, OF_THE_PROMPT)
        ),
        top=body.topk_sample_logprobs or 0,
        records_stability=bool(body.record_stability_info),
        batch_invariant=model.batch_invariant,
        wants_tokens=params.max_tokens != 0,
    )
    job.needs_scores = not job.scoring.is_empty
    top_k = min(params.top_k, vocab_size) if params.top_k > 0 else vocab_size
    alike = params.temperature, top_k, params.top_p, job.rule.device_tokens
    for index in range(body.num_samples):
        settings = row_settings(draw_seeds(params.seed, request_id, index), *alike)
        job.samples.append(Sample(job, index, settings, StopWatch(job.rule, model.decoder)))
    job.waiting = list(job.samples)
    return job


def draw_seeds(seed: int | None, request_id: str, index: int) -> tuple[int, int]:
    """Derive the seeds of a sample, or OF_THE_PROMPT, from the request's seed, or else from its id."""
    source = request_id.encode() if seed is None else (seed % 2**64).to_bytes(8, "little")
    digest = blake2b(source + index.to_bytes(8, "little", signed=True), digest_size=8).digest()
    return int.from_bytes(digest[:4], "little"), int.from_bytes(digest[4:], "little")
