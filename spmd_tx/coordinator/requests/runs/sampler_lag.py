"""Adds to the metrics of optimizer steps how much was sampled for them, and from how old weights.

It knows samplers of weights that were saved without a name while this process runs, which are those of
``save_weights_and_get_sampling_client``.
"""

from collections import OrderedDict
from dataclasses import dataclass, replace

import msgspec

from spmd_tx.coordinator.requests.records import Finished, Outcome, Request
from spmd_tx.coordinator.wire.training import SaveWeightsForSamplerResult

MOST = 10_000  # samplers, and models, that are remembered

SAMPLED, LAG = "sampled_tokens:sum", "sampler_lag:mean"


@dataclass
class _Run:
    """Counts for one model."""

    steps: int = 0  # since this process began
    tokens: int = 0  # sampled since the last step
    samples: int = 0  # requests that ended since the last step
    steps_of_samples: int = 0  # that their weights had, added up


class SamplerLag:
    """Follows models and the samplers of their weights."""

    def __init__(self) -> None:
        self._runs: OrderedDict[str, _Run] = OrderedDict()  # by model, oldest first
        self._samplers: OrderedDict[str, tuple[str, int]] = OrderedDict()  # model, and its steps

    def noted(self, request: Request, outcome: Outcome) -> Outcome:
        """Take note of an outcome, and return it; that of a step with metrics about its samples."""
        if isinstance(outcome, Finished):
            match request.kind:
                case "save_weights_for_sampler":
                    self._saved(request.line, outcome)
                case "sample":
                    self._sampled(request.line, outcome.spent.sampled)
                case "optim_step":
                    return self._stepped(request.line, outcome)
                case _:
                    pass
        return outcome

    def _saved(self, model: str, outcome: Finished) -> None:
        sampler = msgspec.json.decode(outcome.body, type=SaveWeightsForSamplerResult).sampling_session_id
        if sampler is not None:
            self._samplers[sampler] = model, self._run(model).steps
            if len(self._samplers) > MOST:
                self._samplers.popitem(last=False)

    def _sampled(self, sampler: str, tokens: int) -> None:
        if sampler in self._samplers:
            model, steps = self._samplers[sampler]
            run = self._run(model)
            run.tokens += tokens
            run.samples += 1
            run.steps_of_samples += steps

    def _stepped(self, model: str, outcome: Finished) -> Finished:
        run = self._run(model)
        self._runs[model] = _Run(run.steps + 1)
        if not run.samples:
            return outcome
        lag = run.steps - run.steps_of_samples / run.samples
        return replace(outcome, metrics={**outcome.metrics, SAMPLED: float(run.tokens), LAG: lag})

    def _run(self, model: str) -> _Run:
        run = self._runs.setdefault(model, _Run())
        if len(self._runs) > MOST:
            self._runs.popitem(last=False)
        return run
