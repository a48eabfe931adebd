"""Writes and reads the results of sample requests in protobuf. Dimension key: L prompt token, K choice."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from spmd_tx.coordinator.wire import tinker_pb2 as pb

_INT32, _INT64, _FLOAT32 = np.dtype("<i4"), np.dtype("<i8"), np.dtype("<f4")

_OF_BYTES = 2  # protobuf's wire type of bytes and messages
_Part: TypeAlias = bytes | memoryview

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
    forced: Sequence[bool] = ()  # whether a grammar left no choice of each token; empty: it always did

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
    """Write samples in order. ``cache_hits`` counts the prompt tokens found in the prefix cache.

    Arrays may be large, and so each is copied once: the parts of the message are joined, not nested.
    """
    fields = pb.SampleResponse
    parts: list[_Part] = []
    for sequence in sequences:
        parts += _field(fields.SEQUENCES_FIELD_NUMBER, _sequence(sequence))
    if prompt.logprobs is not None:
        parts += _field(fields.PROMPT_LOGPROBS_FIELD_NUMBER, [_plain(prompt.logprobs, _FLOAT32)])
    if prompt.top is not None:
        parts += _field(fields.TOPK_PROMPT_LOGPROBS_FIELD_NUMBER, _top(prompt.top))
    parts.append(fields(prompt_cache_hit_tokens=cache_hits).SerializeToString())
    if prompt.targets is not None:
        parts += _field(fields.TARGET_PROMPT_LOGPROBS_FIELD_NUMBER, _targets(prompt.targets))
    if prompt.drawn_tokens is not None and prompt.drawn_logprobs is not None:
        tokens = _dense(prompt.drawn_tokens, _INT32, pb.DTYPE_INT32)
        logprobs = _dense(prompt.drawn_logprobs, _FLOAT32, pb.DTYPE_FLOAT32)
        drawn = [
            *_field(pb.PromptAltTokens.TOKENS_FIELD_NUMBER, tokens),
            *_field(pb.PromptAltTokens.LOGPROBS_FIELD_NUMBER, logprobs),
        ]
        parts += _field(fields.PROMPT_ALT_TOKENS_FIELD_NUMBER, drawn)
    return b"".join(parts)


class SampledSequences:
    """Reads the samples that ``encode_sample_response`` has written, each when it is asked for."""

    def __init__(self, body: bytes) -> None:
        self._response = pb.SampleResponse.FromString(body)
        self._sequences = self._response.sequences

    def prompt_scores(self) -> PromptScores:
        """Return log-probabilities and likeliest tokens of the prompt, as far as they were asked for."""
        response = self._response
        has_logprobs = response.HasField("prompt_logprobs")
        has_top = response.HasField("topk_prompt_logprobs")
        return PromptScores(
            np.frombuffer(response.prompt_logprobs, _FLOAT32) if has_logprobs else None,
            _read_top(response.topk_prompt_logprobs) if has_top else None,
        )

    @property
    def cache_hits(self) -> int:
        """The number of the prompt's tokens that were found in the prefix cache."""
        return self._response.prompt_cache_hit_tokens

    def __len__(self) -> int:
        return len(self._sequences)

    def __iter__(self) -> Iterator[SampledSequence]:
        return map(self.__getitem__, range(len(self)))

    def __getitem__(self, index: int) -> SampledSequence:
        sequence = self._sequences[index]
        has_top = sequence.HasField("topk_sampled_logprobs")
        return SampledSequence(
            tokens=np.frombuffer(sequence.tokens, _INT32).tolist(),
            logprobs=np.frombuffer(sequence.logprobs, _FLOAT32).tolist(),
            stop_reason="length" if sequence.stop_reason == pb.STOP_REASON_LENGTH else "stop",
            top=_read_top(sequence.topk_sampled_logprobs) if has_top else None,
            forced=tuple(np.frombuffer(sequence.forced, bool).tolist()),
        )


def decode_sample_response(body: bytes) -> list[SampledSequence]:
    """Read all samples, but not the prompt's scores."""
    return list(SampledSequences(body))


def _field(number: int, parts: Sequence[_Part]) -> list[_Part]:
    """Return a field of bytes, or of a message, with its content."""
    size = sum(len(part) if isinstance(part, bytes) else part.nbytes for part in parts)
    return [_varint(number << 3 | _OF_BYTES) + _varint(size), *parts]


def _varint(number: int) -> bytes:
    encoded = bytearray()
    while number >= 1 << 7:
        encoded.append(number & 0x7F | 0x80)
        number >>= 7
    encoded.append(number)
    return bytes(encoded)


def _plain(array: npt.ArrayLike, dtype: np.dtype) -> memoryview:
    """Return the memory of an array, as a message has it."""
    return np.ascontiguousarray(array, dtype).reshape(-1).data


def _sequence(sequence: SampledSequence) -> list[_Part]:
    is_cut = sequence.stop_reason == "length"
    message = pb.SampledSequence(
        stop_reason=pb.STOP_REASON_LENGTH if is_cut else pb.STOP_REASON_STOP,
        tokens=np.asarray(sequence.tokens, _INT32).tobytes(),
        logprobs=np.asarray(sequence.logprobs, _FLOAT32).tobytes(),
        forced=np.asarray(sequence.forced, bool).tobytes(),
    )
    number = pb.SampledSequence.TOPK_SAMPLED_LOGPROBS_FIELD_NUMBER
    top = [] if sequence.top is None else _field(number, _top(sequence.top))
    return [message.SerializeToString(), *top]


def _top(top: TopLogprobs) -> list[_Part]:
    length, count = top.tokens.shape
    return [
        *_field(pb.TopkLogprobs.TOKEN_IDS_FIELD_NUMBER, [_plain(top.tokens, _INT32)]),
        *_field(pb.TopkLogprobs.LOGPROBS_FIELD_NUMBER, [_plain(top.logprobs, _FLOAT32)]),
        pb.TopkLogprobs(k=count, length=length).SerializeToString(),
    ]


def _read_top(message: pb.TopkLogprobs) -> TopLogprobs:
    shape = message.length, message.k
    return TopLogprobs(
        np.frombuffer(message.token_ids, _INT32).reshape(shape),
        np.frombuffer(message.logprobs, _FLOAT32).reshape(shape),
    )


def _targets(targets: TargetLogprobs) -> list[_Part]:
    if targets.row_starts is None or targets.columns is None:
        return _dense(targets.values.reshape(targets.shape), _FLOAT32, pb.DTYPE_FLOAT32)
    sparse = pb.SparseCsr
    parts = [
        *_field(sparse.VALUES_FIELD_NUMBER, [_plain(targets.values, _FLOAT32)]),
        *_field(sparse.CROW_INDICES_FIELD_NUMBER, [_plain(targets.row_starts, _INT64)]),
        *_field(sparse.COL_INDICES_FIELD_NUMBER, [_plain(targets.columns, _INT64)]),
    ]
    tensor = pb.Tensor(dtype=pb.DTYPE_FLOAT32, shape=targets.shape)
    return [*_field(pb.Tensor.SPARSE_CSR_FIELD_NUMBER, parts), tensor.SerializeToString()]


def _dense(array: np.ndarray, dtype: np.dtype, number: pb.DType) -> list[_Part]:
    tensor = pb.Tensor(dtype=number, shape=array.shape)
    return [*_field(pb.Tensor.DENSE_FIELD_NUMBER, [_plain(array, dtype)]), tensor.SerializeToString()]
