"""Which experts the tokens of samples went through: kept beside the results, and looked up for training.

Training on a sample with the experts that it was drawn with keeps the trainer's probabilities close to the
sampler's ("rollout routing replay", Ma et al. 2025). Dimension key: N token, L layer, C choice of an expert.
"""

import os
import re
import threading
from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np
import zstandard

from spmd_tx.coordinator.payloads import Recent
from spmd_tx.coordinator.wire import Span
from spmd_tx.errors import DamagedBody

ROUTING = "routing"  # folder in the data directory
ROUTER_CHOOSES = -1
CACHE_BYTES = 64 << 20
SEQUENCE_ID = re.compile(r"([0-9A-Za-z_-]+):([0-9]+)")  # request and place of the sample in it


class Routing(msgspec.Struct, frozen=True):
    """Of all samples of one request."""

    shape: tuple[int, int]  # L, C
    dtype: str
    prompt: bytes  # of all tokens of the prompt but the last
    samples: list[bytes]  # of the last token of the prompt, and all tokens of the sample but the last

    def of_sample(self, place: int) -> tuple[np.ndarray, int]:
        """Experts [N, L, C] of a prompt with its sample, and how many tokens the prompt has."""
        whole = np.frombuffer(self.prompt + self.samples[place], self.dtype).reshape(-1, *self.shape)
        per_token = self.shape[0] * self.shape[1] * np.dtype(self.dtype).itemsize
        return whole, len(self.prompt) // per_token + 1


def encode(prompt_NLC: np.ndarray | None, samples: Sequence[np.ndarray]) -> bytes:
    """The contents of a request's file; no prompt stands for one of a single token."""
    first = samples[0]
    prompt = first[:0] if prompt_NLC is None else prompt_NLC
    routing = Routing(
        first.shape[1:], first.dtype.str, prompt.tobytes(), [sample.tobytes() for sample in samples]
    )
    return zstandard.ZstdCompressor(level=1, write_checksum=True).compress(msgspec.msgpack.encode(routing))


class RoutingFiles:
    """A directory with a folder for each session, and a file in it for each request. All methods block.

    A request reads only what its own session has sampled. What is not there is for the router to choose.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._recent: Recent[Routing] = Recent(CACHE_BYTES)
        self._lock = threading.Lock()  # of what is recent

    def write(self, session_id: str, request_id: str, contents: bytes) -> None:
        """Durable when it returns; the same again changes nothing."""
        path = self._path(session_id, request_id)
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_suffix(".tmp")
        with unfinished.open("wb") as file:
            file.write(contents)
            file.flush()
            os.fsync(file.fileno())
        unfinished.rename(path)

    def replayed(self, session_id: str, spans: Sequence[Span], length: int) -> np.ndarray | None:
        """Experts int16 [N, L, C] for the tokens of a datum that the spans tile; None: nothing is known."""
        experts: np.ndarray | None = None
        start = 0
        for span in spans:
            known = self._of_span(session_id, span)
            if known is not None and len(known):
                if experts is None:
                    experts = np.full((length, *known.shape[1:]), ROUTER_CHOOSES, np.int16)
                experts[start : start + len(known)] = known
            start += span.length
        return experts

    def _of_span(self, session_id: str, span: Span) -> np.ndarray | None:
        found = SEQUENCE_ID.fullmatch(span.sequence_id)
        routing = self._read(session_id, found[1]) if found else None
        if found is None or routing is None or int(found[2]) >= len(routing.samples):
            return None
        whole, prompt = routing.of_sample(int(found[2]))
        start = span.offset + (prompt if span.is_sampled else 0)
        return whole[start : start + span.length]

    def _read(self, session_id: str, request_id: str) -> Routing | None:
        """Raises DamagedBody when the file is not as it was written; an OSError may go away."""
        path = self._path(session_id, request_id)
        with self._lock:
            routing = self._recent.get(str(path))
        if routing is None:
            try:
                plain = zstandard.ZstdDecompressor().decompress(path.read_bytes())
                routing = msgspec.msgpack.decode(plain, type=Routing)
            except FileNotFoundError:
                return None
            except (zstandard.ZstdError, msgspec.DecodeError) as error:
                raise DamagedBody(
                    f"{path}, which holds the experts of a sample, is damaged ({error}); send the datum "
                    "without provenance spans"
                ) from error
            with self._lock:
                self._recent.put(str(path), routing, len(plain))
        return routing

    def _path(self, session_id: str, request_id: str) -> Path:
        return self._directory / session_id.replace(":", "_") / f"{request_id}.zst"
