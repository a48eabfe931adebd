"""Whatever value a client sends, a parser takes it or refuses it in words; none raises anything else."""

import json
from contextlib import suppress
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from spmd_tx.coordinator.http.tinker import json_forms
from spmd_tx.coordinator.requests.records import Failed
from spmd_tx.coordinator.sampling.request import prompt_scores, validation
from spmd_tx.coordinator.sampling.request.stops import stop_rule
from spmd_tx.coordinator.wire.moments import read_moment
from spmd_tx.coordinator.wire.sampling import SampleRequest
from spmd_tx.coordinator.wire.sampling_protobuf import encode_sample_response
from spmd_tx.errors import InvalidRequest, RequestError
from tests.coordinator.http.routes import WITH_IDS, WITHOUT_IDS, Ids, send
from tests.coordinator.http.tinker.test_fuzz import LIMITS, fuzzed, take

EDGES = [0, 1, 2**31 - 1, 2**31, 2**53, 2**63 - 1, 2**63, 2**64, 10**30, 10**400]
integers = st.integers(-3, 9) | st.sampled_from([*EDGES, *(-edge for edge in EDGES)])
floats = st.floats() | integers.filter(lambda value: abs(value) < 2**1000).map(float)
texts = st.text(max_size=9) | st.sampled_from(["", "\0", "\ufffd", "\U0001f4a9" * 50, "9" * 5000, "é"])
shapes = st.lists(integers, max_size=5) | st.sampled_from([[1] * 65, [2**62] * 5000, [0, 2**63 - 1]])
anything = st.recursive(
    st.none() | st.booleans() | integers | floats.filter(np.isfinite) | texts,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=20,
)


@st.composite
def tensors(draw, rows: int, columns: int) -> dict[str, Any]:
    """As JSON. Mostly what its shape says; perhaps sparse; some of it odd."""
    cells = rows * columns
    tensor: dict[str, Any] = {
        "data": draw(
            st.lists(st.integers(-1, 9) | floats.filter(np.isfinite), min_size=cells, max_size=cells)
        ),
        "dtype": draw(st.sampled_from(["int64"] * 5 + ["float32", "\0"])),
        "shape": [rows, columns] if draw(st.booleans()) else draw(st.none() | shapes),
    }
    if draw(st.booleans()):
        tensor["data"] = [abs(int(each)) % 9 for each in tensor["data"]]
    if draw(st.integers(0, 2)) == 0:
        starts = [columns * row for row in range(rows + 1)]
        places = [column for _ in range(rows) for column in range(columns)]
        tensor["sparse_crow_indices"] = draw(st.just(starts) | st.lists(integers, max_size=5))
        tensor["sparse_col_indices"] = draw(st.just(places) | st.lists(integers, max_size=5))
        tensor["shape"] = draw(st.just(tensor["shape"]) | integers.map(lambda width: [rows, width]))
    return tensor


def decoded(body: object, kind: type[Any]) -> Any:
    """As it comes from the wire; None: it is refused there."""
    try:
        return msgspec.json.decode(json.dumps(body), type=kind)
    except msgspec.DecodeError:
        return None


@fuzzed
@given(tensors(3, 1), tensors(3, 2), st.lists(integers, min_size=3, max_size=3), integers)
def test_a_body_in_json_is_packed_or_refused(targets, weights, tokens, seq_id):
    inputs = {"target_tokens": targets, "weights": weights}
    datum = {"model_input": {"chunks": [{"tokens": tokens}]}, "loss_fn_inputs": inputs}
    loss = {"data": [datum], "loss_fn": "cross_entropy"}
    request = decoded({"model_id": "m", "seq_id": seq_id, "forward_input": loss}, json_forms.LossRequest)
    if request is not None and request.seq_id <= json_forms.MAX_SEQ_ID:
        try:
            _, body = json_forms.to_protobuf(request, forward_only=True)
        except msgspec.ValidationError:
            return
        take(body)


def sample(**wishes: object) -> dict[str, object]:
    return {"prompt": {"chunks": [{"tokens": [1, 2, 3]}]}, **wishes}


WIDE = {"data": [5], "dtype": "int64", "shape": [1, 2**63], "sparse_crow_indices": [0, 1]}


@fuzzed
@given(tensors(2, 2), st.sampled_from([1, 3]))
@example(WIDE | {"sparse_col_indices": [0]}, 2)
@example({"data": [], "dtype": "int64", "shape": [0, 2**64]}, 1)
def test_tokens_named_for_a_prompt_are_answered_or_refused(targets, length):
    body = sample(target_prompt_logprobs=targets, prompt={"chunks": [{"tokens": [1] * length}]})
    answer(decoded(body, SampleRequest))


def test_tokens_named_for_a_prompt_can_be_answered():
    targets = {"data": [5, 6], "dtype": "int64", "shape": [2, 2**31 - 1]}
    layout = {"sparse_crow_indices": [0, 1, 2], "sparse_col_indices": [2**31 - 2, 0]}
    assert answer(decoded(sample(target_prompt_logprobs=targets | layout), SampleRequest))


def answer(body: SampleRequest | None) -> bytes | None:
    """What is done with a sample request beside sampling; None: it is refused."""
    if body is None:
        return None
    try:
        validation.check_sample(body, LIMITS)
        length = sum(len(chunk.tokens or ()) for chunk in body.prompt.chunks)
        wishes = prompt_scores.of(body, length, LIMITS.vocab_size, (0, 0))
    except RequestError:
        return None
    stop_rule(body.sampling_params.stop, (0,))
    wide = np.zeros((length - 1, prompt_scores.MOST_PER_TOKEN), np.float32)
    names = ("top_tokens", "top_logprobs", "target_logprobs", "drawn_tokens", "drawn_logprobs")
    scores = wishes.scores({"logprobs": wide[:, 0], **dict.fromkeys(names, wide)})
    return encode_sample_response([], scores)


@st.composite
def samples(draw) -> dict[str, object]:
    """A few of the fields of a sample request hold something odd."""
    params = {
        "max_tokens": 4, "seed": 1, "stop": ["a"], "temperature": 1.0, "top_k": -1, "top_p": 1.0,
    }  # fmt: skip
    wishes = {
        "num_samples": 1, "prompt_logprobs": True, "prompt_logprobs_last_n": 1, "topk_prompt_logprobs": 2,
        "topk_sample_logprobs": 1, "prompt_alt_tokens_k": 1, "prompt": {"chunks": [{"tokens": [1, 2, 3]}]},
    }  # fmt: skip
    odd = anything | integers | st.lists(integers | texts, max_size=5)
    for fields in (params, wishes):
        for name in draw(st.lists(st.sampled_from(sorted(fields)), max_size=2, unique=True)):
            fields[name] = draw(odd)
    return {**wishes, "sampling_params": params}


@fuzzed
@given(samples())
def test_a_sample_is_answered_or_refused(body):
    answer(decoded(body, SampleRequest))


@fuzzed
@given(texts | st.datetimes().map(str) | integers.map(str) | st.floats().map(str))
def test_a_time_is_read_or_refused(text):
    with suppress(InvalidRequest):
        read_moment("starting_on", text).timestamp()


@pytest.mark.parametrize("text", ["253402300800", "10000-01-01T00:00:00Z", "2026-01-01T00:00:00", "-1"])
def test_what_is_no_time_of_the_calendar_is_refused(text):
    with pytest.raises(InvalidRequest, match="with its offset from UTC"):
        read_moment("starting_on", text)


@fuzzed
@given(st.text() | st.sampled_from(["\ud800", "a\0b", "x" * 100_000]))
def test_an_error_can_be_stored_and_sent_whatever_it_quotes(text):
    error = Failed(text, "user").error
    assert "\0" not in error
    assert len(error) < 20_000
    assert msgspec.json.decode(msgspec.json.encode(error)) == error


OWN = Ids("no-session", "no-request")


def with_nul(value: Any) -> list[Any]:
    """The value again and again, each time with NUL in another one of its texts."""
    if isinstance(value, str):
        return [value + "\0"]
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    places = [(place, odd) for place, inner in items for odd in with_nul(inner)]
    if isinstance(value, dict):
        return [{**value, place: odd} for place, odd in places]
    return [[*value[:place], odd, *value[place + 1 :]] for place, odd in places]


async def test_nul_in_any_text_of_any_body_is_no_fault_of_the_server(api, session_id, model_id):
    own = Ids(session_id, "no-request")
    bodies = [(route, body(own, own)) for route, several in WITH_IDS.items() for body in several]
    more = {"display_name": "a", "project_id": "p", "tags": ["t"], "user_metadata": {"a": "b"}}
    cursor = {"last_created_at": "2026-01-01T00:00:00Z", "last_session_id": "s"}
    search = {"session_id": "s", "project_ids": ["p"], "owner": {"type": "user", "owner_urns": ["o"]}}
    bodies += [
        (("POST", "/api/v1/create_session"), more),
        (("POST", "/api/v1/sessions/search"), {**search, "display_name": "n", "cursor": cursor}),
        (("POST", "/api/v1/sessions/{session_id}/finish"), {"detail": "a"}),
    ]
    for route, body in bodies:
        for odd in with_nul(body):
            response = await send(api, route, own, odd)
            assert response.status_code < 500, (route, odd, response.text)


async def test_nul_in_any_address_is_refused(api, session_id, model_id):
    own = Ids(session_id, "no-request", name="a%00b")
    for route in (*WITH_IDS, *WITHOUT_IDS):
        if "{name}" in route[1]:
            assert (await send(api, route, own)).status_code == 400
    for query in ("checkpoints/current?project_id=a%00b", "training_runs?project_id=%00", "sessions?a%00=b"):
        path = f"billing/usage/{query}" if query.startswith("checkpoints") else query
        refused = await api.get(path)
        assert (refused.status_code, "NUL" in refused.text) == (400, True)


async def test_times_beyond_the_calendar_are_refused(api):
    late = {"last_created_at": "253402300800", "last_session_id": "x"}
    refused = [
        await api.post("sessions/search", json={"cursor": late}),
        await api.get(
            "billing/usage/events",
            params={"starting_on": "0001-01-01T00:00:00Z", "ending_before": "253402300800"},
        ),
    ]
    assert [each.status_code for each in refused] == [400, 400]
    assert all("253402300800" in each.text for each in refused)
