"""Tells clients why an unfinished request waits: how much is ahead of it, and what the workers do."""

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from itertools import takewhile

from spmd_tx.coordinator.requests.records import QueueStatus, Request
from spmd_tx.coordinator.scheduler.command_seconds import CommandSeconds, work_of_chunk
from spmd_tx.coordinator.scheduler.generation import GenerationParts
from spmd_tx.coordinator.scheduler.request_table import RequestTable
from spmd_tx.coordinator.training.line import ModelLine
from spmd_tx.coordinator.training.model import ChunkStep, TrainedModel

COMPILING = re.compile(
    r"compiling (?:continued )?(prefill|forward_backward|forward|decode)(?: with \w+| of sequences)? "
    r"(\d+)x(\d+)(?:x\d+)*"
)
ONLY_SAMPLES = "this base model is only sampled from now (role sample)"
NOT_TRAINED = f"{ONLY_SAMPLES}; the request waits until its group of workers is started again to train"
AWAITED = "waiting until the group that trains has written these weights"
NOT_SAVED = f"{ONLY_SAMPLES}, and these weights come back only when it is trained again, as no file has them"
WORDS = {
    "prefill": "prefill",
    "decode": "decode step",
    "forward": "forward step",
    "forward_backward": "training step",
}


@dataclass(frozen=True)
class QueueView:
    """Explains the queue of one generation."""

    parts: GenerationParts
    table: RequestTable
    lines: Mapping[str, ModelLine]  # by model
    seconds: CommandSeconds
    unsaved: Collection[str] = ()  # samplers that wait for workers that train

    def status(self, request_id: str, busy: str | None) -> QueueStatus:
        """``busy`` is what the workers do instead of running commands."""
        unfinished = self.table.find_unfinished(request_id)
        if unfinished is None:
            return QueueStatus("active", None)
        request, activity = unfinished.request, busy and in_words(busy)
        if not self.parts.trains and (request.kind != "sample" or request.line in self.unsaved):
            not_there = AWAITED if self.parts.versions.store.is_shared else NOT_SAVED
            return QueueStatus("paused_capacity", not_there if request.kind == "sample" else NOT_TRAINED)
        if request.kind != "sample":
            entry = self.lines.get(request.line)
            slots = self.parts.training.slots
            obstacle = entry and (self._compiling(entry.model) or slots.obstacle(entry.model))
            state = "active" if obstacle is None else "paused_capacity"
            errand = entry and entry.model.errand
            return QueueStatus(state, _joined([activity, obstacle, errand, self._before_training(request)]))
        obstacle = self.parts.sampling.status(request_id)
        state = "active" if obstacle is None else "paused_capacity"
        return QueueStatus(state, _joined([obstacle and in_words(obstacle), activity]))

    def _compiling(self, model: TrainedModel) -> str | None:
        reason = self.parts.compilation.orders.reason
        return in_words(reason(model.missing[0])) if model.missing else None

    def _before_training(self, request: Request) -> str | None:
        entry = self.lines.get(request.line)
        if entry is None:
            return None
        if entry.to_run_again:
            return f"restoring the model: {entry.to_run_again} of its requests are run again"
        missing = entry.line.missing
        if missing is not None and missing < request.seq_id:
            return f"waiting for request {missing} of this model, which has not arrived"
        line = self.table.unfinished_of_line(request.line)
        ahead = sum(other.seq_id < request.seq_id for other in line)
        earlier = f"behind {counted(ahead, 'earlier request')} of this model" if ahead else None
        return _joined([earlier, self._of_others(entry), self._time_before(request, entry)])

    def _of_others(self, entry: ModelLine) -> str | None:
        """Describe the steps of other models that are ready to be sent; models take turns."""
        others = [each.model.unsent for each in self.lines.values() if each is not entry]
        chunks = sum(isinstance(step, ChunkStep) for unsent in others for step in unsent)
        models = sum(1 for unsent in others if unsent)
        if not chunks:
            return None
        have = "which has" if models == 1 else "which have"
        ready = counted(chunks, "micro-batch", "micro-batches")
        return f"taking turns with {counted(models, 'other model')}, {have} {ready} ready"

    def _time_before(self, request: Request, entry: ModelLine) -> str | None:
        """Say how long the micro-batches take that are ready and may be sent before a request's own."""
        others = [step for each in self.lines.values() if each is not entry for step in each.model.unsent]
        earlier = list(takewhile(lambda step: step.request_id != request.id, entry.model.unsent))
        works = [work_of_chunk(step.chunk) for step in others + earlier if isinstance(step, ChunkStep)]
        seconds = sum(self.seconds.estimate(work) or 0.0 for work in works)
        seconds *= 2 if self.parts.sampling.waiting() else 1  # half of the time is theirs
        return f"about {counted(round(seconds), 'second')} of work before it" if seconds >= 1 else None


def counted(number: int, thing: str, things: str | None = None) -> str:
    return f"{number:,} {thing if number == 1 else things or thing + 's'}"


def in_words(busy: str) -> str:
    """Describe what the workers compile to people who do not know the shapes of programs."""
    return COMPILING.sub(_words, busy)


def _words(found: re.Match[str]) -> str:
    step, (rows, tokens) = WORDS[found[1]], map(int, found.groups()[1:])
    what = f"a {step} of {rows} x {tokens} tokens" if rows > 1 else f"a {tokens}-token {step}"
    return f"compiling {f'a {step}' if found[1] == 'decode' else what}"


def _joined(reasons: Iterable[str | None]) -> str | None:
    return "; ".join(filter(None, reasons)) or None
