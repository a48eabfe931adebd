"""Adds to the metrics of optimizer steps what was sampled for them, and from how old weights.

It knows samplers of weights that were saved without a name while this process runs, which are those of
``save_weights_and_get_sampling_client``. A group is two or more answers to one prompt from these weights,
drawn since the step before. It trains when a sample of it gets an advantage, as provenance spans tell. How
many have trained is said only of models whose spans have named a sample of a group.
"""

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import msgspec
import numpy as np

from spmd_tx.coordinator.requests.records import DrawnFacts, Finished, LearnedFacts, Outcome, Request
from spmd_tx.coordinator.runtime.threads import compute
from spmd_tx.coordinator.wire.training import SaveWeightsForSamplerResult

MOST = 10_000  # samplers, and models, that are remembered
MOST_GROUPS = 4096  # of a model between two steps
MOST_SAMPLES = 50_000  # whose groups, or whose advantages, are remembered
ENTRY_BYTES = 100  # that the advantages of a request count for, where they are put in order

SAMPLED, LAG = "sampled_tokens:sum", "sampler_lag:mean"
LENGTH, CUT_OFF = "answer_tokens:mean", "answers_cut_off:mean"
GROUPS, TRAINED = "groups_sampled:sum", "groups_trained:sum"

Advantages = Mapping[int, float]  # by place in the request


@dataclass
class _Group:
    """Follows the answers to one prompt."""

    answers: int = 0
    trains: bool = False


@dataclass
class _Run:
    """Counts for one model since its last step; but for the first two, which are of this process."""

    steps: int = 0
    is_traced: bool = False  # whether spans have named a sample of its groups
    tokens: int = 0  # that were sampled
    samples: int = 0  # requests that ended
    steps_of_samples: int = 0  # that their weights had, added up
    answers: int = 0  # those with facts, here and below
    answer_tokens: int = 0
    cut_off: int = 0
    groups: dict[int, _Group] = field(default_factory=dict)  # by prompt
    trained: int = 0  # groups

    def metrics(self) -> dict[str, float]:
        """Return what is known of the samples for the next step."""
        known = dict[str, float]()
        if self.samples:
            known[SAMPLED] = float(self.tokens)
            known[LAG] = self.steps - self.steps_of_samples / self.samples
        if self.answers:
            known[LENGTH] = self.answer_tokens / self.answers
            known[CUT_OFF] = self.cut_off / self.answers
        groups = sum(group.answers > 1 for group in self.groups.values())
        if groups:
            known[GROUPS] = float(groups)
        if self.is_traced and (groups or self.trained):
            known[TRAINED] = float(self.trained)
        return known


class RolloutMetrics:
    """Follows models, the samplers of their weights, and what becomes of samples."""

    def __init__(self) -> None:
        self._runs: OrderedDict[str, _Run] = OrderedDict()  # by model, oldest first
        self._samplers: OrderedDict[str, tuple[str, int]] = OrderedDict()  # model, and its steps
        self._groups: OrderedDict[str, tuple[str, _Group]] = OrderedDict()  # by sample request: model, group
        self._advantages: OrderedDict[tuple[str, str], Advantages] = OrderedDict()  # by model and request
        self._num_advantages = 0

    def noted(self, request: Request, outcome: Outcome) -> Outcome:
        """Take note of an outcome, and return it; that of a step with metrics about its samples."""
        if isinstance(outcome, Finished):
            match request.kind:
                case "save_weights_for_sampler":
                    self._saved(request.line, outcome)
                case "sample":
                    self._sampled(request, outcome)
                case "forward_backward" if isinstance(outcome.rollouts, LearnedFacts):
                    self._learned(request.line, outcome.rollouts)
                case "optim_step":
                    return self._stepped(request.line, outcome)
                case _:
                    pass
        return outcome

    def advantages(self, model: str, sample_request: str) -> Advantages:
        """Return the advantages that a model was last trained with on the samples of a request."""
        return self._advantages.get((model, sample_request), {})

    async def by_advantage(self, model: str, *, highest: bool) -> list[str]:
        """Return the sample requests that a model was trained on, by their highest, or lowest, advantage."""
        known = [*self._advantages.items()]
        return await compute(ENTRY_BYTES * len(known), _ordered, known, model, highest)

    def _saved(self, model: str, outcome: Finished) -> None:
        sampler = msgspec.json.decode(outcome.body, type=SaveWeightsForSamplerResult).sampling_session_id
        if sampler is not None:
            self._samplers[sampler] = model, self._run(model).steps
            if len(self._samplers) > MOST:
                self._samplers.popitem(last=False)

    def _sampled(self, request: Request, outcome: Finished) -> None:
        if request.line not in self._samplers or not outcome.spent.sampled:  # of what only scores, nothing
            return
        model, steps = self._samplers[request.line]
        run, drawn = self._run(model), outcome.rollouts
        run.tokens += outcome.spent.sampled
        run.samples += 1
        run.steps_of_samples += steps
        if not isinstance(drawn, DrawnFacts):
            return
        run.answers += drawn.answers
        run.answer_tokens += outcome.spent.sampled
        run.cut_off += drawn.cut_off
        if drawn.prompt in run.groups or len(run.groups) < MOST_GROUPS:
            group = run.groups.setdefault(drawn.prompt, _Group())
            group.answers += drawn.answers
            self._groups[request.id] = model, group
            if len(self._groups) > MOST_SAMPLES:
                self._groups.popitem(last=False)

    def _learned(self, model: str, learned: LearnedFacts) -> None:
        run = self._run(model)
        for request_id, advantages in learned.advantages.items():
            of_model, group = self._groups.get(request_id, (None, None))
            if of_model == model and group is not None and group.answers > 1:
                run.is_traced = True
                if not group.trains:
                    group.trains = any(advantages.values())
                    run.trained += group.trains
            before = self._advantages.pop((model, request_id), {})
            together = {**before, **advantages}
            self._advantages[model, request_id] = together
            self._num_advantages += len(together) - len(before)
        while self._num_advantages > MOST_SAMPLES:
            _, forgotten = self._advantages.popitem(last=False)
            self._num_advantages -= len(forgotten)

    def _stepped(self, model: str, outcome: Finished) -> Finished:
        run = self._run(model)
        self._runs[model] = _Run(run.steps + 1, run.is_traced)
        known = run.metrics()
        return replace(outcome, metrics={**outcome.metrics, **known}) if known else outcome

    def _run(self, model: str) -> _Run:
        run = self._runs.setdefault(model, _Run())
        if len(self._runs) > MOST:
            self._runs.popitem(last=False)
        return run


def _ordered(known: Sequence[tuple[tuple[str, str], Advantages]], model: str, highest: bool) -> list[str]:
    """Order the requests of a model. NumPy sorts, since other threads run meanwhile."""
    best = max if highest else min
    of_model = [(each, best(values.values())) for (of, each), values in known if of == model and values]
    keys = np.array([value for _, value in of_model])
    return [of_model[place][0] for place in np.argsort(-keys if highest else keys, kind="stable").tolist()]
