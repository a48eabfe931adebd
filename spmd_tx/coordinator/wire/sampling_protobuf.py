"""Writes and reads the results of sample requests in protobuf. Dimension key: L prompt token, K choice."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, overload

import numpy as np

from spmd_tx.coordinator.wire import tinker_pb2 as pb

_INT32, _INT64, _FLOAT32 = np.dtype("<i4"), np.dtype("<i8"), np.dtype("<f4")

NO_LOGPROB = np.float32(-99999.0)  # beside token 0: an empty cell


@dataclass(frozen=True)
class TopLogprobs:
    """Holds the likeliest tokens of N positions, likeliest first. An empty row has token 0 and NO_LOGPROB."""

    tokens: np.ndarray  # int32 [N, K]
    logprobs: np.ndarray  # float32 [N, K]; nats

    @classmethod
    def none(cls, positions: int, count: int) -> TopLogprobs:
        """Empty rows for a number of positions."""
        return cls(
            np.zeros((positions, count), np.int32), np.full((positions, count), NO_LOGPROB, np.float32)
        )

    @classmethod
    def join(cls, parts: Sequence[TopLogprobs]) -> TopLogprobs:
        """Concatenate along the positions."""
        return cls(
            np.concatenate([part.tokens for part in parts]), np.concatenate([part.logprobs for part in parts])
        )

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, positions: slice) -> TopLogprobs:
        return TopLogprobs(self.tokens[positions].copy(), self.logprobs[positions].copy())


@dataclass(frozen=True)
class SampledSequence:
    """Holds one sample: its tokens with their log-probabilities, and why it ended."""

    tokens: list[int]
    logprobs: list[float]  # nats
    stop_reason: Literal["stop", "length"]
    top: TopLogprobs | None = None  # a row for each token

    def top_of(self, first: int, end: int) -> TopLogprobs | None:
        """Return the likeliest tokens in the places of some tokens."""
        return None if self.top is None else self.top[first:end]


@dataclass(frozen=True)
class TargetLogprobs:
    """Holds log-probabilities of the tokens that a request has named, in the layout of the request."""

    values: np.ndarray  # float32 [cells]; 0 where no token was named
    shape: tuple[int, ...]
    row_starts: np.ndarray | None = None  # int64, of a sparse matrix (CSR); None: dense
    columns: np.ndarray | None = None  # int64


@dataclass(frozen=True)
class PromptScores:
    """Holds what a request has asked to know about its prompt; None: it has not asked."""

    logprobs: np.ndarray | None = None  # float32 [L]; NaN where there is none
    top: TopLogprobs | None = None  # of L positions
    targets: TargetLogprobs | None = None
    drawn_tokens: np.ndarray | None = None  # int32 [L - 1, K]
    drawn_logprobs: np.ndarray | None = None  # float32 [L - 1, K]


NO_SCORES = PromptScores()


def encode_sample_response(
    sequences: Sequence[SampledSequence], prompt: PromptScores = NO_SCORES, cache_hits: int = 0
) -> bytes:
    """Write samples in order. ``cache_hits`` counts the prompt tokens found in the prefix cache."""
    response = pb.SampleResponse(prompt_cache_hit_tokens=cache_hits)
    for sequence in sequences:
        is_cut = sequence.stop_reason == "length"
        response.sequences.add(
            stop_reason=pb.STOP_REASON_LENGTH if is_cut else pb.STOP_REASON_STOP,
            tokens=np.asarray(sequence.tokens, _INT32).tobytes(),
            logprobs=np.asarray(sequence.logprobs, _FLOAT32).tobytes(),
            topk_sampled_logprobs=None if sequence.top is None else _top(sequence.top),
        )
    if prompt.logprobs is not None:
        response.prompt_logprobs = np.asarray(prompt.logprobs, _FLOAT32).tobytes()
    if prompt.top is not None:
        response.topk_prompt_logprobs.CopyFrom(_top(prompt.top))
    if prompt.targets is not None:
        response.target_prompt_logprobs.CopyFrom(_targets(prompt.targets))
    if prompt.drawn_tokens is not None and prompt.drawn_logprobs is not None:
        response.prompt_alt_tokens.tokens.CopyFrom(_dense(prompt.drawn_tokens, _INT32, pb.DTYPE_INT32))
        logprobs = _dense(prompt.drawn_logprobs, _FLOAT32, pb.DTYPE_FLOAT32)
        response.prompt_alt_tokens.logprobs.CopyFrom(logprobs)
    return response.SerializeToString(deterministic=True)


class SampledSequences(Sequence[SampledSequence]):
    """Reads the samples that ``encode_sample_response`` has written, each when it is asked for."""

    def __init__(self, body: bytes) -> None:
        self._sequences = pb.SampleResponse.FromString(body).sequences

    def __len__(self) -> int:
        return len(self._sequences)

    @overload
    def __getitem__(self, index: int) -> SampledSequence: ...
    @overload
    def __getitem__(self, index: slice) -> list[SampledSequence]: ...
    def __getitem__(self, index: int | slice) -> SampledSequence | list[SampledSequence]:
        if isinstance(index, slice):
            return [self[place] for place in range(*index.indices(len(self)))]
        sequence = self._sequences[index]
        has_top = sequence.HasField("topk_sampled_logprobs")
        return SampledSequence(
            tokens=np.frombuffer(sequence.tokens, _INT32).tolist(),
            logprobs=np.frombuffer(sequence.logprobs, _FLOAT32).tolist(),
            stop_reason="length" if sequence.stop_reason == pb.STOP_REASON_LENGTH else "stop",
            top=_read_top(sequence.topk_sampled_logprobs) if has_top else None,
        )


def decode_sample_response(body: bytes) -> list[SampledSequence]:
    """Read all samples, but not the prompt's scores."""
    return list(SampledSequences(body))


def _top(top: TopLogprobs) -> pb.TopkLogprobs:
    length, count = top.tokens.shape
    return pb.TopkLogprobs(
        token_ids=np.asarray(top.tokens, _INT32).tobytes(),
        logprobs=np.asarray(top.logprobs, _FLOAT32).tobytes(),
        k=count,
        length=length,
    )


def _read_top(message: pb.TopkLogprobs) -> TopLogprobs:
    shape = message.length, message.k
    return TopLogprobs(
        np.frombuffer(message.token_ids, _INT32).reshape(shape),
        np.frombuffer(message.logprobs, _FLOAT32).reshape(shape),
    )


def _targets(targets: TargetLogprobs) -> pb.Tensor:
    if targets.row_starts is None or targets.columns is None:
        return _dense(targets.values.reshape(targets.shape), _FLOAT32, pb.DTYPE_FLOAT32)
    sparse = pb.SparseCsr(
        values=np.asarray(targets.values, _FLOAT32).tobytes(),
        crow_indices=np.asarray(targets.row_starts, _INT64).tobytes(),
        col_indices=np.asarray(targets.columns, _INT64).tobytes(),
    )
    return pb.Tensor(sparse_csr=sparse, dtype=pb.DTYPE_FLOAT32, shape=targets.shape)


def _dense(array: np.ndarray, dtype: np.dtype, number: pb.DType) -> pb.Tensor:
    return pb.Tensor(dense=np.asarray(array, dtype).tobytes(), dtype=number, shape=array.shape)
