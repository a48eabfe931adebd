"""Stability notes: sampled tokens and their log-probabilities, kept for the loss stable_reinforce.

A sample request writes a note if it asks for one. A note is kept for a day after its last use; the reaper
keeps it longer while a training request that used it may have to be replayed. Dimension key: N token.
"""

import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np

from spmd_tx.coordinator.requests import sample_notes
from spmd_tx.coordinator.requests.sample_notes import OF_OWNER, SEQUENCE_ID, STABILITY, Holders, NoteFiles
from spmd_tx.coordinator.runtime import clock
from spmd_tx.coordinator.wire.sampling_protobuf import SampledSequence
from spmd_tx.coordinator.wire.training_protobuf import Datum, TokenSpan
from spmd_tx.errors import InvalidRequest

KEPT_SECONDS = 24 * 3600.0  # after the last use
REMEDY = (
    "sample with a client of save_weights_and_get_sampling_client or create_sampling_client that was made "
    "with record_stability_info=True, in the session of the model that is trained, and train within a day, "
    "or use another loss_fn, as importance_sampling with the logprobs of the samples"
)


class Recorded(msgspec.Struct, frozen=True):
    """Holds the tokens and log-probabilities of all samples of one request."""

    tokens: list[bytes]  # int32
    logprobs: list[bytes]  # float32, nats

    def of_sample(self, place: int) -> tuple[np.ndarray, np.ndarray]:
        """Return tokens and log-probabilities [N] of one sample."""
        return np.frombuffer(self.tokens[place], "<i4"), np.frombuffer(self.logprobs[place], "<f4")


def encode(sequences: Sequence[SampledSequence]) -> bytes:
    """Encode the note of a request."""
    tokens = [np.asarray(each.tokens, "<i4").tobytes() for each in sequences]
    logprobs = [np.asarray(each.logprobs, "<f4").tobytes() for each in sequences]
    return sample_notes.encode(Recorded(tokens, logprobs))


class _Run(NamedTuple):
    """Holds a run of a datum's targets that one span covers."""

    span: TokenSpan
    start: int  # place of its first target in the datum
    counts: np.ndarray  # bool [length]: whether there is an advantage


class StabilityFiles:
    """Reads the stability notes of a data directory. All methods block."""

    def __init__(self, data_dir: Path) -> None:
        self._files = NoteFiles(
            data_dir / STABILITY, Recorded, "the probabilities", "sample again, and train on that"
        )

    def resolved(self, holders: Holders, datums: Sequence[Datum], *, is_again: bool) -> list[Datum]:
        """Return the datums with the recorded ``logprobs``, 0 where there is no advantage.

        Raises InvalidRequest. A request that ``is_again`` run may use notes older than a day.
        """
        resolved = []
        for index, datum in enumerate(datums):
            try:
                logprobs = self._logprobs(holders, datum, is_again)
            except InvalidRequest as problem:
                raise InvalidRequest(f"datum {index}: {problem}") from None
            resolved.append(replace(datum, loss_inputs=datum.loss_inputs | {"logprobs": logprobs}))
        return resolved

    def _logprobs(self, holders: Holders, datum: Datum, is_again: bool) -> np.ndarray:
        targets = datum.loss_inputs["target_tokens"].ravel()
        logprobs = np.zeros(len(targets), np.float32)
        for run in _runs_that_count(datum):
            tokens, recorded = self._recorded(holders, run, is_again)
            place = slice(run.start, run.start + run.span.length)
            differs = run.counts & (tokens != targets[place])
            if differs.any():
                first = int(differs.argmax())
                raise InvalidRequest(
                    f"target_tokens has {targets[run.start + first]} at position {run.start + first}, and "
                    f"token {run.span.offset + first} of sequence {run.span.sequence_id!r}, which "
                    f"loss_fn_input_spans names for it, is {tokens[first]}; the spans must say where each "
                    "target comes from"
                )
            logprobs[place] = np.where(run.counts, recorded, 0)
        return logprobs

    def _recorded(self, holders: Holders, run: _Run, is_again: bool) -> tuple[np.ndarray, np.ndarray]:
        """Return the tokens of a run's span and their log-probabilities."""
        span = run.span
        match = SEQUENCE_ID.fullmatch(span.sequence_id)
        renewed = (each for each in holders if match is not None and self._renew(each, match[1], is_again))
        holder = next(renewed, None)
        note = self._files.read(holder, match[1]) if match and holder is not None else None
        if match is None or note is None or int(match[2]) >= len(note.tokens):
            raise InvalidRequest(
                f"nothing is recorded of sequence {span.sequence_id!r} in this session, or not any more; "
                f"{REMEDY}"
            )
        tokens, logprobs = note.of_sample(int(match[2]))
        if span.offset + span.length > len(tokens):
            raise InvalidRequest(
                f"loss_fn_input_spans names tokens {span.offset} to {span.offset + span.length - 1} of "
                f"sequence {span.sequence_id!r}, which has {len(tokens)}; offsets count its sampled tokens"
            )
        place = slice(span.offset, span.offset + span.length)
        return tokens[place], logprobs[place]

    def _renew(self, holder: str, request_id: str, is_again: bool) -> bool:
        """Start the day of a note anew; return False if it is over, or there is no note.

        Notes of trajectories are kept as long as these.
        """
        path, now = self._files.path(holder, request_id), clock.now()
        is_kept = is_again or holder.startswith(OF_OWNER)
        with suppress(FileNotFoundError):
            if is_kept or now - path.stat().st_mtime <= KEPT_SECONDS:
                os.utime(path, (now, now))
                return True
        return False


def _runs_that_count(datum: Datum) -> list[_Run]:
    """Return the runs of targets with an advantage, each of one sample."""
    if not datum.target_spans:
        why = datum.span_problem or "it has no loss_fn_input_spans"
        raise InvalidRequest(
            f"{why}; stable_reinforce must know which samples the targets come from, "
            "so name them with Datum.with_provenance, or use another loss_fn"
        )
    counts = datum.loss_inputs["advantages"].ravel() != 0
    runs, start = [], 0
    for span in datum.target_spans:
        run = _Run(span, start, counts[start : start + span.length])
        start += span.length
        if not run.counts.any():
            continue
        if not span.is_sampled:
            place = run.start + int(run.counts.argmax())
            raise InvalidRequest(
                f"position {place} has an advantage, and loss_fn_input_spans says that its target belongs to "
                "a prompt; send advantage 0 there, or the span of the sample that it was drawn in"
            )
        runs.append(run)
    return runs
