"""Requests that once stopped a server: each is answered now, and a bystander sees nothing of it."""

import base64
import socket
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import numpy as np
import pytest

from spmd_tx.coordinator.wire import tinker_pb2 as pb
from tests.fuzz import odd_grammars
from tests.fuzz.alice import Alice, Note, differences
from tests.fuzz.calls import ANTHROPIC, BASE_MODEL, OPENAI
from tests.fuzz.conftest import DATABASES, ROUNDS, new_database
from tests.fuzz.fuzzing import errors_in
from tests.fuzz.served import Served, serving
from tests.fuzz.tenant import DONE, FAILED, REFUSED, Tenant, sparse, tensor

KILLS = 2
HUGE = 10**400


def _ssh(kind: str, *parts: bytes) -> str:
    packed = b"".join(struct.pack(">I", len(part)) + part for part in (kind.encode(), *parts))
    return f"{kind} {base64.b64encode(packed).decode()}"


def _export(recipient: str) -> Callable[[Tenant], httpx.Response]:
    def send(tenant: Tenant) -> httpx.Response:
        body = {
            "model_id": tenant.model(),
            "seq_id": 1,
            "path": "ck",
            "age_encryption_recipients": [recipient],
        }
        return tenant.post("save_weights_external", body)

    return send


def _step(seq_id: int) -> Callable[[Tenant], httpx.Response]:
    return lambda tenant: tenant.post("optim_step", {"model_id": tenant.model(), "seq_id": seq_id})


def _shape(*shape: int) -> Callable[[Tenant], httpx.Response]:
    return lambda tenant: tenant.train(tensor(list(shape), []))


def _sparse_shape(*shape: int) -> Callable[[Tenant], httpx.Response]:
    return lambda tenant: tenant.train(sparse(list(shape), [], [0], []))


def _weights(shape: list[int]) -> pb.Tensor:
    return pb.Tensor(dtype=pb.DTYPE_FLOAT32, shape=shape, dense=np.ones(shape, "<f4").tobytes())


def _span_of_many_digits(tenant: Tenant) -> httpx.Response:
    drawn = tenant.sample(record_stability_info=True).json()["request_id"]
    assert tenant.outcome(drawn) == DONE
    request = tenant.batch(tensor([3]), "stable_reinforce", advantages=_weights([3]))
    for spans in (request.data[0].model_input_spans, request.data[0].loss_fn_input_spans):
        span = spans.add().sampled_tokens
        span.sequence_id, span.length = f"{drawn}:{'9' * 5000}", 3
    return tenant.send(request)


def _targets(
    tokens: list[int], shape: list[int], data: list[float], **more: list[int]
) -> Callable[[Tenant], httpx.Response]:
    targets = {"data": data, "dtype": "int64", "shape": shape, **more}
    return lambda tenant: tenant.sample(tokens, target_prompt_logprobs=targets)


def _json(name: str = "forward", **wrong: object) -> Callable[[Tenant], httpx.Response]:
    return lambda tenant: tenant.train_json(name, **wrong)  # pyright: ignore[reportArgumentType]


def _sparse_json(starts: list[int], columns: list[int]) -> dict[str, object]:
    return {"shape": [3, 3], "sparse_crow_indices": starts, "sparse_col_indices": columns}


def _custom_loss(**changes: str) -> Callable[[Tenant], httpx.Response]:
    node = {"op": "call_function", "name": "a", "target": "torch.exp", "args": [], **changes}
    body = {"name": "l", "inputs": [{"name": "logprobs", "rank": 1}]}
    logprobs = {"op": "placeholder", "name": "logprobs", "target": "logprobs"}
    graph = {"nodes": [logprobs, node, {"op": "output", "name": "output", "target": "output"}]}

    def send(tenant: Tenant) -> httpx.Response:
        numbered = {"session_id": tenant.session, "custom_loss_seq_id": tenant.number()}
        return tenant.post("create_custom_loss", {**numbered, **body, "graph": graph})

    return send


def _stops(stop: list[str]) -> Callable[[Tenant], httpx.Response]:
    return lambda tenant: tenant.sample(params={"stop": stop})


def _search(created_at: str) -> Callable[[Tenant], httpx.Response]:
    cursor = {"last_created_at": created_at, "last_session_id": "x"}
    return lambda tenant: tenant.post("sessions/search", {"cursor": cursor})


def _asked(path: str) -> Callable[[Tenant], httpx.Response]:
    return lambda tenant: tenant.get(path)


def _prompt(route: str, **body: object) -> Callable[[Tenant], httpx.Response]:
    return lambda tenant: tenant.http.post(
        OPENAI + route, json={"model": BASE_MODEL, "max_tokens": 1, **body}
    )


def _message(**body: object) -> Callable[[Tenant], httpx.Response]:
    asked = {"model": BASE_MODEL, "max_tokens": 1, "messages": [{"role": "user", "content": "a"}], **body}
    return lambda tenant: tenant.http.post(ANTHROPIC + "messages", json=asked)


def _form(schema: object) -> Callable[[Tenant], httpx.Response]:
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    said = [{"role": "user", "content": "a"}]
    return _prompt("chat/completions", messages=said, response_format=form)


LONG = "many words " * (1 << 18)
ROWS = {"sparse_crow_indices": [0, 1], "sparse_col_indices": [0]}
FAR_COLUMN = {"sparse_crow_indices": [0, 1], "sparse_col_indices": [2**64]}

MET_BEFORE: dict[str, Callable[[Tenant], httpx.Response]] = {
    "a step with the last number": _step(2**63 - 1),
    "a step with a number far ahead": _step(10**7),
    "an RSA key without an exponent": _export("ssh-rsa AAAAB3NzaC1yc2EAAAAAAAAAAQA="),
    "an RSA key of nothing": _export(_ssh("ssh-rsa", b"", b"")),
    "an ed25519 key of nothing": _export(_ssh("ssh-ed25519", b"")),
    "a shape of no rows and many columns": _shape(0, 2**63 - 1),
    "a shape of many rows and no columns": _shape(2**63 - 1, 0),
    "a shape of 65 dimensions": _shape(*[1] * 65),
    "a shape of 65 dimensions, one of them 0": _shape(*[1] * 64, 0),
    "a sparse shape of no rows and many columns": _sparse_shape(0, 2**63 - 1),
    "a span whose sample has 5,000 digits": _span_of_many_digits,
    "sparse targets as wide as no integer": _targets([5, 6], [1, 2**63], [5.0], **ROWS),
    "targets of a shape of 30 digits": _targets([5], [0, 10**30], []),
    "targets of a shape as wide as no integer": _targets([5], [0, 2**64], []),
    "a target in a column that is no integer": _targets([5, 6], [1, 2**70], [5.0], **FAR_COLUMN),
    **{
        f"JSON: {name} with {what}": _json(name, **wrong)
        for name in ("forward", "forward_backward")
        for what, wrong in {
            "a token of 400 digits": {"tokens": [HUGE]},
            "row starts of 400 digits": _sparse_json([0, 1, 2, HUGE], [0, 0, 0]),
            "columns of 400 digits": _sparse_json([0, 1, 2, 3], [0, 0, HUGE]),
            "a shape of 30 digits": {"shape": [10**30]},
            "a shape of 2^63": {"shape": [2**63]},
            "a shape below all integers": {"shape": [-(2**63) - 1]},
        }.items()
    },
    "a node whose op has a NUL": _custom_loss(op="a\0b"),
    "a node whose target has a NUL": _custom_loss(target="a\0b"),
    "a node whose name has a NUL": _custom_loss(name="a\0b"),
    "a node whose target has half a character": _custom_loss(target="a\ud800"),
    "a thousand stop strings": _stops([f"stop {number}" for number in range(1000)]),
    "a long stop string": _stops(["x" * 10_000]),
    "a long prompt": _prompt("completions", prompt=LONG),
    "many long prompts": _prompt("completions", prompt=[LONG[: 1 << 19]] * 4),
    "a long message": _prompt("chat/completions", messages=[{"role": "user", "content": LONG}]),
    "a long message of Anthropic's": _message(messages=[{"role": "user", "content": LONG}]),
    "megabytes of tools": _message(tools=[{"name": "f", "description": LONG, "input_schema": {}}]),
    "a message of many blanks": _message(messages=[{"role": "user", "content": " " * 100_000}]),
    "ten million samples": lambda tenant: tenant.sample(num_samples=10**7),
    "wide log-probabilities of many samples": lambda tenant: tenant.sample(
        params={"max_tokens": 500}, num_samples=1024, topk_sample_logprobs=20
    ),
    "wide log-probabilities of many choices": _prompt(
        "completions", prompt=[[1, 2]] * 8, n=128, max_tokens=500, logprobs=20
    ),
    "a chain of 3,000 references": _form(odd_grammars.chained(3000)),
    "rules within each other": _prompt("completions", prompt="a", grammar=odd_grammars.WITHIN_EACH_OTHER),
    "many patterns for one text": _form(odd_grammars.of_patterns(60)),
    "9,000 optional properties": _form(odd_grammars.optional(9000)),
    "a search from the year 10000": _search("253402300800"),
    "usage until the year 10000": _asked(
        "billing/usage/events?starting_on=0001-01-01T00:00:00Z&ending_before=253402300800"
    ),
    "a project with a NUL": _asked("billing/usage/checkpoints/current?project_id=a%00b"),
}  # fmt: skip

GOOD: dict[str, Callable[[Tenant], httpx.Response]] = {
    "the audit log of the last day": _asked("audit?day=9999-12-31"),
    "a step in its turn": _step(1),
    "a sample": lambda tenant: tenant.sample(),
    "a batch": lambda tenant: tenant.train(tensor([3]), weights=_weights([3])),
    "a text of a rare token": _prompt("completions", prompt="a", regex="\0", max_tokens=2),
}


@dataclass
class Scene:
    """A server on which all of this happens."""

    served: Served
    alice: Alice
    tenant: Tenant


@pytest.fixture(scope="module", params=DATABASES)
def scene(
    request: pytest.FixtureRequest,
    model_dir: Path,
    peace: list[Note],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Scene]:
    folder = tmp_path_factory.mktemp("scene") / "run"
    with new_database(request) as url, serving(folder, model_dir, url) as served:
        assert served.start()
        alice = Alice(served.url, served.tokens["alice"], ROUNDS)
        alice.start()
        tenant = Tenant(served.url, served.tokens["mallory"])
        yield Scene(served, alice, tenant)
        alice.leave()
        tenant.close()


@pytest.mark.parametrize("name", MET_BEFORE)
def test_it_is_refused_or_fails_by_the_sender(scene: Scene, name: str) -> None:
    scene.alice.allow()
    answer = MET_BEFORE[name](scene.tenant)
    assert scene.tenant.verdict(answer) in (REFUSED, FAILED)
    assert "not known" not in answer.text  # it is refused for what it says, and not for a field of the test


@pytest.mark.parametrize("name", GOOD)
def test_what_is_in_order_is_done(scene: Scene, name: str) -> None:
    assert scene.tenant.verdict(GOOD[name](scene.tenant)) == DONE


def test_slow_senders_of_large_bodies_leave_room_for_others(scene: Scene) -> None:
    url = httpx.URL(scene.served.url)
    key = scene.served.tokens["mallory"]
    head = f"POST /api/v1/telemetry HTTP/1.1\r\nHost: {url.host}\r\nX-Api-Key: {key}\r\n"
    slow = [socket.create_connection((url.host, url.port or 0)) for _ in range(3)]
    for each in slow:
        each.sendall(f"{head}Content-Length: {64 << 20}\r\n\r\n{{".encode())
    answer = scene.tenant.train(tensor([3]), weights=_weights([1 << 16]))
    for each in slow:
        each.close()
    assert scene.tenant.verdict(answer) == FAILED  # as the weights are too many


def test_after_kills_all_is_as_it_was(scene: Scene, peace: list[Note]) -> None:
    served, tenant = scene.served, scene.tenant
    for _ in range(KILLS):
        served.kill()
        assert served.start(), served.log.read_text()[-3000:]
    assert {request: tenant.outcome(request) for request in tenant.requests} == tenant.requests
    scene.alice.finish_rounds()
    scene.alice.join(120)
    assert scene.alice.errors == []
    assert differences(peace, scene.alice.notes) == []
    assert len(scene.alice.notes) == len(peace)
    assert scene.alice.refusals == 0
    assert served.metric('spmd_tx_generation{group="main"}') == 1 + KILLS
    assert errors_in(served.log.read_text()) == []
