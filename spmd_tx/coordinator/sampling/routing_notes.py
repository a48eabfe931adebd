"""Routing notes: the experts of sampled tokens, kept beside the results and replayed in training.

Replay keeps the trainer's probabilities close to the sampler's ("rollout routing replay", Ma et al. 2025).
Dimension key: N token, L layer, C choice of an expert.
"""

from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np

from spmd_tx.coordinator.requests import sample_notes
from spmd_tx.coordinator.requests.sample_notes import ROUTING, SEQUENCE_ID, Holders, NoteFiles
from spmd_tx.coordinator.wire.training_protobuf import TokenSpan

ROUTER_CHOOSES = -1  # in place of an expert that is not known


class Routing(msgspec.Struct, frozen=True):
    """Holds the experts of all samples of one request."""

    shape: tuple[int, int]  # L, C
    dtype: str
    prompt: bytes  # all prompt tokens but the last
    samples: list[bytes]  # for each: the last prompt token, and all sampled tokens but the last

    def of_sample(self, place: int) -> tuple[np.ndarray, int]:
        """Return experts [N, L, C] of the prompt and one sample, and the prompt's number of tokens."""
        whole = np.frombuffer(self.prompt + self.samples[place], self.dtype).reshape(-1, *self.shape)
        per_token = self.shape[0] * self.shape[1] * np.dtype(self.dtype).itemsize
        return whole, len(self.prompt) // per_token + 1


def encode(prompt_NLC: np.ndarray | None, samples: Sequence[np.ndarray]) -> bytes:
    """Encode the note of a request; ``prompt_NLC`` is None for a prompt of one token."""
    first = samples[0]
    prompt = first[:0] if prompt_NLC is None else prompt_NLC
    return sample_notes.encode(
        Routing(first.shape[1:], first.dtype.str, prompt.tobytes(), [sample.tobytes() for sample in samples])
    )


class RoutingFiles:
    """Reads the routing notes of a data directory. All methods block.

    The router chooses the experts of tokens without a note.
    """

    def __init__(self, data_dir: Path) -> None:
        self._files = NoteFiles(
            data_dir / ROUTING, Routing, "the experts", "send the datum without provenance spans"
        )

    def replayed(self, holders: Holders, spans: Sequence[TokenSpan], length: int) -> np.ndarray | None:
        """Return experts int16 [N, L, C] for a datum that the spans tile; None: nothing is known."""
        experts: np.ndarray | None = None
        start = 0
        for span in spans:
            known = self._of_span(holders, span)
            if known is not None and len(known):
                if experts is None:
                    experts = np.full((length, *known.shape[1:]), ROUTER_CHOOSES, np.int16)
                experts[start : start + len(known)] = known
            start += span.length
        return experts

    def _of_span(self, holders: Holders, span: TokenSpan) -> np.ndarray | None:
        match = SEQUENCE_ID.fullmatch(span.sequence_id)
        notes = (self._files.read(each, match[1]) for each in holders if match is not None)
        routing = next((note for note in notes if note is not None), None)
        if match is None or routing is None or int(match[2]) >= len(routing.samples):
            return None
        whole, prompt = routing.of_sample(int(match[2]))
        start = span.offset + (prompt if span.is_sampled else 0)
        return whole[start : start + span.length]
