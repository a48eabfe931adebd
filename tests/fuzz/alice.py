"""The bystander: she trains, samples and saves in rounds, and notes every number that she is told."""

import threading
import time
from collections.abc import Callable
from hashlib import blake2b
from typing import Any

import httpx
import numpy as np

from spmd_tx.coordinator.wire import tinker_pb2 as pb
from tests.fuzz.calls import API, BASE_MODEL, JSON, PROTOBUF

SECONDS = 300  # for one answer, with all restarts in between
PAUSE = 0.1  # between two attempts
TOLERANCE = 1e-5  # of sampled log-probabilities, in nats: they depend on what else is in the batch
RANK = 4
Note = tuple[str, Any]


class Alice(threading.Thread):
    """One program; the numbers in ``notes`` follow from its rounds alone."""

    def __init__(self, url: str, token: str, most: int | None = None, rank: int = RANK) -> None:
        """``most`` rounds, or as many as she is allowed. A ``rank`` of 0 trains all weights."""
        super().__init__(daemon=True)
        self._http = httpx.Client(base_url=url + API, headers={"x-api-key": token}, timeout=60)
        self._most, self._seq_id, self._samples = most, 0, 0
        self._lora = {"rank": rank, "seed": 42}
        self._may_go_on = threading.Semaphore(0)
        self._allowed = 0
        self.is_leaving = threading.Event()
        self.rounds = 0
        self.notes: list[Note] = []
        self.errors: list[str] = []
        self.refusals = 0  # with 503 and 429
        self.longest_wait = 0.0  # seconds, for one result

    def allow(self, rounds: int = 1) -> None:
        """She never begins a round too early, so that there is something to do until the end."""
        self._allowed += rounds
        for _ in range(rounds):
            self._may_go_on.release()

    def finish_rounds(self) -> None:
        """Let her come to the end: ``most`` rounds, or all that she was allowed."""
        if self._most is None:
            self._most = self._allowed
        self.allow(self._most + 1)  # the last one only lets her see that there is nothing more to do

    def join_while_told(self, seconds: float, is_served: Callable[[], bool]) -> None:
        """Wait for her end, as long as the server lives and tells her something within so many seconds."""
        told, deadline = -1, 0.0
        while self.is_alive() and is_served():
            if len(self.notes) > told:
                told, deadline = len(self.notes), time.monotonic() + seconds
            if time.monotonic() > deadline:
                return
            self.join(1)

    def leave(self) -> None:
        """At once, whatever she waits for."""
        self.is_leaving.set()
        self.allow()
        self.join()

    def run(self) -> None:
        try:
            self._train()
        except Exception as error:
            self.errors.append(repr(error))
        finally:
            self._http.close()

    def _train(self) -> None:
        body = {"tags": [], "sdk_version": "0.38.0", "display_name": "alice"}
        session = self._post("create_session", body)["session_id"]
        new = {"session_id": session, "base_model": BASE_MODEL}
        self._future("create_model", {**new, "model_seq_id": 0, "lora_config": self._lora})
        self._model, self._session = f"{session}:train:0", session
        base = self._post("create_sampling_session", {**new, "sampling_session_seq_id": 0})
        while True:
            self._may_go_on.acquire()
            if self.is_leaving.is_set():
                return
            if self.rounds == self._most:
                break
            self._round(self.rounds, base["sampling_session_id"])
            self.rounds += 1
        # Others may wait for its end: a server that trains all weights has room for one session's model.
        self._post(f"sessions/{session}/finish", {"reason": {"type": "success"}})

    def _round(self, number: int, base: str) -> None:
        random = np.random.default_rng([7, number])
        batches = [self._send_batch(random) for _ in range(2)]
        step = self._request("optim_step", {**self._numbered(), "adam_params": {"learning_rate": 0.01}})
        for batch in batches:
            self._note_batch(self._result(batch, PROTOBUF))
        self._note("step", self._result(step).json()["metrics"])
        self._sample(base, random)
        if number % 4 == 1:
            own = {"sampling_session_seq_id": number + 1, "kind": "snapshot"}
            saved = self._future("save_weights_for_sampler", {**self._numbered(), **own})
            self._sample(saved["sampling_session_id"], random)
        if number % 4 == 3:
            self._future("save_weights", {**self._numbered(), "path": f"state-{number}"})
            self._note_export(f"export-{number}")

    def _numbered(self) -> dict[str, Any]:
        self._seq_id += 1
        return {"model_id": self._model, "seq_id": self._seq_id}

    def _send_batch(self, random: np.random.Generator) -> str:
        request = pb.ForwardBackwardRequest(**self._numbered(), loss_fn="cross_entropy")
        for length in random.integers(2, 12, 2):
            tokens = random.integers(0, 90, length + 1)
            datum = request.data.add()
            datum.model_input.add().encoded_text.tokens = tokens[:-1].astype("<i4").tobytes()
            targets, weights = datum.loss_fn_inputs["target_tokens"], datum.loss_fn_inputs["weights"]
            targets.dtype, targets.dense = pb.DTYPE_INT64, tokens[1:].astype("<i8").tobytes()
            weights.dtype, weights.dense = pb.DTYPE_FLOAT32, np.ones(length, "<f4").tobytes()
            targets.shape.append(length)
            weights.shape.append(length)
        return self._request("forward_backward", request.SerializeToString())

    def _sample(self, sampler: str, random: np.random.Generator) -> None:
        self._samples += 1
        body = {
            "sampling_session_id": sampler,
            "seq_id": self._samples,
            "num_samples": 2,
            "prompt": {"chunks": [{"tokens": random.integers(0, 90, 5).tolist()}]},
            "sampling_params": {"max_tokens": 6, "seed": self._samples, "stop": []},
            "prompt_logprobs": True,
        }
        answer = pb.SampleResponse.FromString(self._result(self._request("asample", body), PROTOBUF).content)
        self._note("sampled", [list(np.frombuffer(each.tokens, "<i4").tolist()) for each in answer.sequences])
        logprobs = [np.frombuffer(each.logprobs, "<f4") for each in answer.sequences]
        self._note("sampled logprobs", [*np.concatenate(logprobs).tolist()])

    def _note_batch(self, answer: httpx.Response) -> None:
        output = pb.ForwardBackwardOutput.FromString(answer.content)
        logprobs = [record.fields["logprobs"].data.hex() for record in output.loss_fn_outputs]
        self._note("batch", [logprobs, dict(sorted(output.metrics.items()))])

    def _note_export(self, name: str) -> None:
        """Its bytes, as she would download them."""
        self._future("save_weights_external", {**self._numbered(), "path": name})
        where = f"training_runs/{self._model}/checkpoints/external_weights/{name}/external_weights_urls"
        urls = self._until_answered("GET", where).json()["urls"]
        [weights] = [url for file, url in urls.items() if file.endswith(".safetensors")]
        content = self._until_answered("GET", weights).content
        self._note("export", blake2b(content, digest_size=16).hexdigest())

    def _note(self, what: str, value: object) -> None:
        self.notes.append((what, value))

    def _future(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        return self._result(self._request(path, body)).json()

    def _request(self, path: str, body: dict[str, Any] | bytes) -> str:
        return self._post(path, body)["request_id"]

    def _post(self, path: str, body: dict[str, Any] | bytes) -> dict[str, Any]:
        return self._until_answered("POST", path, body).json()

    def _result(self, request_id: str, accept: str = JSON) -> httpx.Response:
        began = time.monotonic()
        answer = self._until_answered("POST", "retrieve_future", {"request_id": request_id}, accept)
        self.longest_wait = max(self.longest_wait, time.monotonic() - began)
        if accept == JSON and "error" in answer.json():
            raise RuntimeError(answer.text)
        if accept != JSON and answer.headers["content-type"].startswith(JSON):
            raise RuntimeError(answer.text)
        return answer

    def _until_answered(
        self, method: str, path: str, body: dict[str, Any] | bytes | None = None, accept: str = JSON
    ) -> httpx.Response:
        """Ask again as the SDK does, while the server is away or has no room."""
        is_bytes = isinstance(body, bytes)
        headers = {"accept": accept, "content-type": PROTOBUF if is_bytes else JSON}
        content: dict[str, Any] = {"content": body} if is_bytes else {} if body is None else {"json": body}
        deadline = time.monotonic() + SECONDS
        while True:
            try:
                answer = self._http.request(method, path, headers=headers, **content)
                if answer.status_code not in (408, 429, 503):
                    return answer.raise_for_status()
                self.refusals += answer.status_code != 408
            except httpx.TransportError:
                pass
            if self.is_leaving.is_set() or time.monotonic() > deadline:
                raise TimeoutError(f"{method} {path} has no answer")
            time.sleep(PAUSE)


def differences(expected: list[Note], notes: list[Note], tolerance: float = TOLERANCE) -> list[str]:
    """Where a run differs from another one, as far as both have got."""
    return [
        f"note {place}: {what} is {value!r} and was {was!r} in peace"
        for place, ((what, was), (_, value)) in enumerate(zip(expected, notes, strict=False))
        if not _is_same(what, was, value, tolerance)
    ]


def _is_same(what: str, was: Any, value: Any, tolerance: float) -> bool:
    if what == "sampled logprobs":
        return len(was) == len(value) and np.allclose(was, value, rtol=0, atol=tolerance)
    return was == value
