"""What clients of the recovery tests ask for, and what the answers must be: it follows from the requests."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import msgspec
import numpy as np

from spmd_tx.coordinator.requests.records import Failed, Finished, Outcome, RequestKind
from spmd_tx.coordinator.sampling.new_job import draw_seeds
from spmd_tx.coordinator.wire import sampling, tinker_pb2, training
from tests.coordinator.recovery import replay_device
from tests.coordinator.recovery.replay_device import SlotState
from tests.coordinator.sampling.fake_device import VOCABULARY, continuation
from tests.coordinator.training.bench import forward_backward, logprobs

RANK = 4


@dataclass
class Asked:
    """One request of a client, and what it was told so far."""

    kind: RequestKind
    line: str
    seq_id: int
    session_id: str
    payload: bytes
    apply: Callable[[SlotState | None], tuple[SlotState | None, object]]  # state after it; its answer
    read: Callable[[Finished], object]  # the answer in a result
    is_bad: bool = False  # it must fail, and change nothing
    request_id: str | None = None
    outcome: Outcome | None = None


@dataclass
class Client:
    """A session with one model. Its samplers and checkpoints are known once their requests are answered."""

    session_id: str
    asked: list[Asked] = field(default_factory=list)  # of the model, in the order of their numbers
    samples: list[Asked] = field(default_factory=list)
    held_back: list[Asked] = field(default_factory=list)  # numbered, and not yet sent
    saved: dict[str, SlotState] = field(default_factory=dict)  # by path, as far as the answers are known
    samplers: dict[int, str] = field(default_factory=dict)  # weights by number; likewise
    has_ended: bool = False

    @property
    def model_id(self) -> str:
        return f"{self.session_id}:train:0"

    @property
    def everything(self) -> list[Asked]:
        return [*self.asked, *self.samples]

    def create(self, seed: int) -> Asked:
        lora = training.LoraConfig(RANK, seed)
        body = training.CreateModelRequest(self.session_id, 0, "tiny", None, lora)
        return self._ask("create_model", body, lambda _: (replay_device.created(seed), self.model_id), _model)

    def train(self, lengths: list[int], token: int, forward_only: bool) -> Asked:
        body = forward_backward(*lengths, token=token, forward_only=forward_only)

        def apply(state: SlotState | None) -> tuple[SlotState | None, object]:
            assert state is not None
            answer = [[np.float32(replay_device.scored(state, token, token))] * length for length in lengths]
            if not forward_only:
                for length in lengths:
                    state = replay_device.with_gradient(state, [token] * length, [token] * length)
            return state, [[float(value) for value in datum] for datum in answer]

        return self._ask("forward" if forward_only else "forward_backward", body, apply, _logprobs)

    def train_badly(self) -> Asked:
        body = forward_backward(3, token=VOCABULARY + 1)
        return self._ask("forward_backward", body, _refuse, _logprobs, is_bad=True)

    def step(self, learning_rate: float) -> Asked:
        body = training.OptimStepRequest(
            self.model_id, len(self.asked), training.AdamParams(learning_rate=learning_rate)
        )

        def apply(state: SlotState | None) -> tuple[SlotState | None, object]:
            assert state is not None
            norm = {"unclipped_grad_l2:mean": float(state.gradient % 4096)}
            return replay_device.stepped(state, learning_rate), norm | {"learning_rate:mean": learning_rate}

        return self._ask("optim_step", body, apply, lambda result: _json(result)["metrics"])

    def save(self) -> Asked:
        name = f"state-{len(self.asked)}"
        body = training.SaveWeightsRequest(self.model_id, len(self.asked), name)
        path = f"tinker://{self.model_id}/weights/{name}"

        def apply(state: SlotState | None) -> tuple[SlotState | None, object]:
            assert state is not None
            self.saved[path] = SlotState(state.weights, 0, state.steps)
            return state, path

        return self._ask("save_weights", body, apply, lambda result: _json(result)["path"])

    def load(self, path: str, optimizer: bool) -> Asked:
        body = training.LoadWeightsRequest(path, optimizer)
        saved = self.saved[path]

        def apply(state: SlotState | None) -> tuple[SlotState | None, object]:
            return SlotState(saved.weights, 0, saved.steps if optimizer else 0), path

        return self._ask("load_weights", body, apply, lambda result: _json(result)["path"])

    def save_sampler(self) -> Asked:
        number = len(self.asked)
        body = training.SaveWeightsForSamplerRequest(
            self.model_id, number, None, sampling_session_seq_id=number
        )

        def apply(state: SlotState | None) -> tuple[SlotState | None, object]:
            assert state is not None
            self.samplers[number] = state.weights
            return state, f"{self.session_id}:sample:{number}"

        def read(result: Finished) -> object:
            return _json(result)["sampling_session_id"]

        return self._ask("save_weights_for_sampler", body, apply, read)

    def sample(self, number: int, prompt: list[int], count: int) -> Asked:
        seed = len(self.samples)
        params = sampling.SamplingParams(max_tokens=count, seed=seed, stop=[])
        body = sampling.SampleRequest(sampling.ModelInput([sampling.ModelInputChunk(tokens=prompt)]), params)
        tokens, _ = continuation(self.samplers[number], prompt, draw_seeds(seed, "", 0), count)
        asked = Asked(
            "sample",
            f"{self.session_id}:sample:{number}",
            seed,
            self.session_id,
            msgspec.json.encode(body),
            lambda state: (state, tokens),
            _tokens,
        )
        self.samples.append(asked)
        return asked

    def check(self) -> SlotState | None:
        """Compare what was told with what must be; the state behind everything that was answered in order."""
        state: SlotState | None = None
        for asked in self.asked:
            if asked.outcome is None:
                return state
            if asked.is_bad:
                assert isinstance(asked.outcome, Failed), f"{asked.seq_id} should have failed"
                assert asked.outcome.category == "user"
                continue
            state, answer = asked.apply(state)
            assert isinstance(asked.outcome, Finished), f"{asked.kind} {asked.seq_id}: {asked.outcome}"
            assert asked.read(asked.outcome) == answer, f"{asked.kind} {asked.seq_id}"
        for asked in self.samples:
            if asked.outcome is not None:
                assert isinstance(asked.outcome, Finished), asked.outcome
                assert asked.read(asked.outcome) == asked.apply(None)[1]
        return state

    def _ask(
        self,
        kind: RequestKind,
        body: msgspec.Struct | bytes,
        apply: Callable[[SlotState | None], tuple[SlotState | None, object]],
        read: Callable[[Finished], object],
        is_bad: bool = False,
    ) -> Asked:
        payload = body if isinstance(body, bytes) else msgspec.json.encode(body)
        asked = Asked(kind, self.model_id, len(self.asked), self.session_id, payload, apply, read, is_bad)
        self.asked.append(asked)
        return asked


def _refuse(state: SlotState | None) -> tuple[SlotState | None, object]:
    return state, None


def _json(result: Finished) -> Mapping[str, object]:
    return msgspec.json.decode(result.body)


def _model(result: Finished) -> object:
    return _json(result)["model_id"]


def _logprobs(result: Finished) -> object:
    return [array.tolist() for array in logprobs(tinker_pb2.ForwardBackwardOutput.FromString(result.body))]


def _tokens(result: Finished) -> object:
    [sequence] = tinker_pb2.SampleResponse.FromString(result.body).sequences
    return (
        np.frombuffer(sequence.tokens, np.int32).tolist()
        if isinstance(sequence.tokens, bytes)
        else list(sequence.tokens)
    )
