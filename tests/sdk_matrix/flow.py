"""One training run with whichever tinker SDK runs this file, written so that every release understands it.

Usage: python flow.py URL BASE_MODEL. Prints one line of JSON: what each step gave, or why it failed.
"""

import io
import json
import sys
import tarfile
import time
import traceback
import urllib.request
from collections.abc import Callable
from importlib.metadata import version
from typing import Any, get_args

import tinker
from tinker import types

SECONDS = 120
TOKENS = [[(7 * place + 31 * row + 3) % 250 for place in range(12 + 5 * row)] for row in range(3)]
PROMPT = TOKENS[1][:8]
LOSSES = {
    "cross_entropy": None,
    "importance_sampling": None,
    "ppo": {"clip_low_threshold": 0.9, "clip_high_threshold": 1.1},
    "cispo": {"clip_low_threshold": 0.5, "clip_high_threshold": 2.0},
    "dro": {"beta": 0.05},
}

ERRORS = (
    tinker.TinkerError,
    AssertionError,
    AttributeError,
    LookupError,
    RuntimeError,
    TypeError,
    ValueError,
)

Step = Callable[["Flow"], Any]
steps: dict[str, Step] = {}


def step(function: Step) -> Step:
    steps[function.__name__] = function
    return function


def done(future: Any) -> Any:
    """The value, whether this release answers with a future or with the value itself."""
    return future.result(SECONDS) if hasattr(future, "result") else future


def datum(tokens: list[int], loss: str, logprobs: list[float]) -> types.Datum:
    length = len(tokens) - 1
    inputs: dict[str, list] = {"target_tokens": tokens[1:]}
    if loss == "cross_entropy":
        inputs["weights"] = [1.0] * length
    else:
        sampled = [value + 0.4 * (place % 3 - 1) for place, value in enumerate(logprobs)]  # ratios to clip
        inputs |= {"logprobs": sampled, "advantages": [(-1.0) ** place for place in range(length)]}
    return types.Datum(model_input=types.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=inputs)


class Flow:
    """What one step leaves for those after it."""

    def __init__(self, url: str, base_model: str) -> None:
        self.base_model = base_model
        self.service = tinker.ServiceClient(base_url=url, api_key="tml-matrix")
        self.rest = self.service.create_rest_client()
        self.trainer: Any = None
        self.logprobs: list[list[float]] = []  # of TOKENS, by the untrained model
        self.state_path = self.sampler_path = ""

    def data(self, loss: str) -> list[types.Datum]:
        return [datum(*row) for row in zip(TOKENS, [loss] * len(TOKENS), self.logprobs, strict=True)]

    def supervised(self) -> list[types.Datum]:
        return [datum(tokens, "cross_entropy", []) for tokens in TOKENS]

    def forward(self, trainer: Any) -> tuple[float, list[list[float]]]:
        """The loss, and log-probabilities of the targets."""
        output = done(trainer.forward(self.supervised(), "cross_entropy"))
        return output.metrics["loss:sum"], [
            fields["logprobs"].to_numpy().tolist() for fields in output.loss_fn_outputs
        ]


@step
def capabilities(flow: Flow) -> list[str]:
    return [model.model_name for model in flow.service.get_server_capabilities().supported_models]


@step
def create(flow: Flow) -> str:
    flow.trainer = done(flow.service.create_lora_training_client(flow.base_model, rank=4, seed=11))
    info = flow.trainer.get_info()
    assert info.model_id == flow.trainer.model_id
    return info.model_data.model_name


@step
def forward(flow: Flow) -> float:
    loss, flow.logprobs = flow.forward(flow.trainer)
    expected = -sum(map(sum, flow.logprobs))
    assert abs(loss - expected) < 1e-2, (loss, expected)
    return loss


@step
def forward_backward(flow: Flow) -> dict[str, float]:
    """With every loss that the release knows; the step after each is none, and only clears the gradient."""
    found = {}
    for loss in [loss for loss in LOSSES if loss in get_args(types.LossFnType)]:
        config = LOSSES[loss]
        output = done(flow.trainer.forward_backward(flow.data(loss), loss, config))
        found[loss] = output.metrics["loss:sum"]
        done(flow.trainer.optim_step(types.AdamParams(learning_rate=0.0)))
    return found


@step
def optim_step(flow: Flow) -> list[float]:
    """Submitted back to back, as in a training loop."""
    adam = types.AdamParams(learning_rate=0.02)
    pairs = [
        (flow.trainer.forward_backward(flow.supervised(), "cross_entropy"), flow.trainer.optim_step(adam))
        for _ in range(3)
    ]
    losses = [done(gradient).metrics["loss:sum"] for gradient, update in pairs if done(update)]
    assert losses[2] < losses[1] < losses[0], losses
    return losses


@step
def save_state(flow: Flow) -> None:
    flow.state_path = done(flow.trainer.save_state("matrix")).path
    assert flow.state_path.startswith("tinker://"), flow.state_path


@step
def resume(flow: Flow) -> float:
    """New clients go on where the saved one was, with its optimizer if the release can say so."""
    fresh = done(flow.service.create_training_client_from_state(flow.state_path))
    assert fresh.model_id != flow.trainer.model_id
    saved = flow.forward(flow.trainer)[0]
    assert flow.forward(fresh)[0] == saved
    if not hasattr(flow.service, "create_training_client_from_state_with_optimizer"):
        return saved
    resumed = done(flow.service.create_training_client_from_state_with_optimizer(flow.state_path))
    losses = []
    for trainer in (flow.trainer, resumed):
        done(trainer.forward_backward(flow.supervised(), "cross_entropy"))
        done(trainer.optim_step(types.AdamParams(learning_rate=0.02)))
        losses.append(flow.forward(trainer)[0])
    assert losses[0] == losses[1] < saved, losses
    return saved


@step
def load_state(flow: Flow) -> float:
    other = done(flow.service.create_lora_training_client(flow.base_model, rank=4, seed=12))
    done(other.load_state(flow.state_path))
    return flow.forward(other)[0]


@step
def save_for_sampler(flow: Flow) -> None:
    flow.sampler_path = done(flow.trainer.save_weights_for_sampler("matrix")).path
    assert "/sampler_weights/" in flow.sampler_path, flow.sampler_path


@step
def sample(flow: Flow) -> list[int]:
    """By name and without one; what is drawn has the log-probabilities that forward gives it."""
    prompt = types.ModelInput.from_ints(PROMPT)
    params = types.SamplingParams(max_tokens=6, temperature=1.0, seed=5, stop=[])
    named = done(flow.service.create_sampling_client(model_path=flow.sampler_path))
    drawn = done(named.sample(prompt, 2, params)).sequences
    assert [len(sequence.tokens) for sequence in drawn] == [6, 6]
    unnamed = done(flow.trainer.save_weights_and_get_sampling_client())
    again = done(unnamed.sample(prompt, 2, params)).sequences
    assert [list(each.tokens) for each in drawn] == [list(each.tokens) for each in again]
    content = PROMPT + list(drawn[0].tokens)
    scored = done(flow.trainer.forward([datum(content, "cross_entropy", [])], "cross_entropy"))
    expected = scored.loss_fn_outputs[0]["logprobs"].to_numpy().tolist()[-6:]
    assert max(abs(a - b) for a, b in zip(expected, drawn[0].logprobs, strict=True)) < 1e-3
    return [token for sequence in drawn for token in sequence.tokens]


@step
def compute_logprobs(flow: Flow) -> None:
    base = done(flow.service.create_sampling_client(base_model=flow.base_model))
    found = done(base.compute_logprobs(types.ModelInput.from_ints(TOKENS[0])))
    assert found[0] is None, found
    assert max(abs(a - b) for a, b in zip(found[1:], flow.logprobs[0], strict=True)) < 1e-3


@step
def failure(flow: Flow) -> None:
    """Bad data fails its own request with words, and the client goes on."""
    bad = [datum([1, 2, 99_999_999], "cross_entropy", [])]
    message = None
    try:
        done(flow.trainer.forward_backward(bad, "cross_entropy"))
    except (tinker.TinkerError, ValueError) as error:
        message = str(error)
    assert message is not None and "99999999" in message, message  # noqa: PT018 (no pytest here)
    done(flow.trainer.optim_step(types.AdamParams(learning_rate=0.0)))


@step
def download(flow: Flow) -> list[str]:
    """The saved sampler weights: as an archive up to 0.35, and as an export file by file afterwards."""
    if hasattr(flow.rest, "get_checkpoint_archive_url"):
        answer = done(flow.rest.get_checkpoint_archive_url(flow.trainer.model_id, "sampler_weights/matrix"))
        with tarfile.open(fileobj=io.BytesIO(fetch(answer.url))) as archive:
            files = {member.name: archive.extractfile(member).read() for member in archive if member.isfile()}
    else:
        exported = done(flow.trainer.save_weights_external("matrix")).path
        urls = done(flow.rest.get_external_weights_urls(exported)).urls
        files = {name: fetch(url) for name, url in urls.items()}
        done(flow.rest.delete_checkpoint_from_tinker_path(exported))
    assert json.loads(files["adapter_config.json"])["r"] == 4
    return sorted({"adapter_config.json", "adapter_model.safetensors"} & files.keys())


def fetch(url: str) -> bytes:
    with urllib.request.urlopen(url, timeout=SECONDS) as answer:
        return answer.read()


@step
def checkpoints(flow: Flow) -> list[str]:
    """List, then delete one."""
    run_id = flow.trainer.model_id
    listed = sorted(each.checkpoint_id for each in done(flow.rest.list_checkpoints(run_id)).checkpoints)
    if hasattr(flow.rest, "search_checkpoints"):
        found = done(flow.rest.search_checkpoints(checkpoint_type="training")).checkpoints
        assert flow.state_path in [each.tinker_path for each in found]
        assert {each.base_model for each in found} == {flow.base_model}
    done(flow.rest.delete_checkpoint(run_id, "weights/matrix"))
    left = [each.checkpoint_id for each in done(flow.rest.list_checkpoints(run_id)).checkpoints]
    assert left == ["sampler_weights/matrix"], left
    runs = done(flow.rest.list_training_runs(limit=100)).training_runs
    assert run_id in [run.training_run_id for run in runs]
    return listed


@step
def finish(flow: Flow) -> str:
    if not hasattr(flow.service, "close"):
        return "heartbeats stop"
    done(flow.service.close("success"))
    return "closed"


def failed(error: Exception) -> dict[str, Any]:
    """The table shows the message, the test's report the rest. Later steps would need this one."""
    traceback.print_exception(error)
    return {"error": f"{type(error).__name__}: {error}"}


def run(url: str, base_model: str) -> dict[str, dict[str, Any]]:
    flow = Flow(url, base_model)
    found: dict[str, dict[str, Any]] = {}
    for name, each in steps.items():
        start = time.monotonic()
        try:
            found[name] = {"value": each(flow)}
        except ERRORS as error:
            return found | {name: failed(error)}
        found[name]["seconds"] = round(time.monotonic() - start, 2)
    return found


if __name__ == "__main__":
    print(json.dumps({"version": version("tinker"), "steps": run(*sys.argv[1:])}), flush=True)
