"""Every field has an effect, is known to have none, or is refused by its name."""

import re
from pathlib import Path

import httpx
import openai
import pytest
from openai.types import completion_create_params
from openai.types.chat import completion_create_params as chat_create_params

from spmd_tx.coordinator.http.openai import fields
from spmd_tx.coordinator.http.openai.schemas import ChatRequest, CompletionRequest
from spmd_tx.coordinator.http.text_generation import field_checks
from tests.coordinator.http.openai.test_routes import BASE_MODEL, completion

DOCS = Path(__file__).parents[4] / "docs" / "openai.md"


@pytest.fixture
def oai(api):
    api.base_url = httpx.URL("http://server/oai/api/v1/")
    return api


def chat(**more):
    return {"model": BASE_MODEL, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2} | more


BODIES = [("completions", completion), ("chat/completions", chat)]
both = pytest.mark.parametrize("path, body", BODIES, ids=["completions", "chat"])

REFUSED = {
    "frequency_penalty": 0.5,
    "presence_penalty": -1,
    "logit_bias": {"5": 1},
    "best_of": 3,
    "suffix": "x",
    "min_p": 0.5,
    "min_tokens": 3,
    "repetition_penalty": 1.3,
    "ignore_eos": True,
    "stop_token_ids": [5],
    "skip_special_tokens": False,
    "tools": [{"type": "function", "function": {"name": "f"}}],
    "tool_choice": "required",
    "functions": [{"name": "f"}],
    "function_call": {"name": "f"},
    "response_format": {"type": "json_object"},
    "modalities": ["text", "audio"],
    "audio": {"voice": "alloy"},
    "verbosity": "low",
    "service_tier": "priority",
    "store": True,
    "web_search_options": {},
    "moderation": {"model": "x"},
    "continue_final_message": True,
    "add_generation_prompt": False,
    "documents": [{"text": "a"}],
    "bad_words": ["a"],
    "guided_json": {"type": "object"},
    "structured_outputs": {"regex": "a"},
    "truncate_prompt_tokens": 2,
    "prompt_logprobs": 1,
    "tempreature": 0.5,
    "include_reasoning": True,
}
FOR_CHATS = ("tools", "tool_choice", "response_format")


@both
async def test_what_is_not_offered_is_refused_by_name(oai, path, body):
    for name, value in REFUSED.items():
        if path != "completions" and name in FOR_CHATS:
            continue
        refused = await oai.post(path, json=body(**{name: value}))
        error = refused.json()["error"]
        assert (refused.status_code, error["type"], error["param"]) == (400, "invalid_request_error", name)
        assert error["code"] in (field_checks.UNKNOWN, field_checks.NOT_OFFERED, field_checks.OTHER_VALUE)
        assert error["message"].startswith(f"{name} is not ")
        assert "; " in error["message"], "there is no remedy"


@both
async def test_fields_that_are_null_count_as_missing(oai, path, body):
    assert (await oai.post(path, json=body(**dict.fromkeys(REFUSED)))).status_code == 200


@both
async def test_values_that_ask_for_what_happens_anyway_are_taken(oai, path, body):
    harmless = {name: values[0] for name, values in fields.DEFAULTS.items() if values and "." not in name}
    harmless |= dict.fromkeys(fields.LABELS, "x") | {"metadata": {"a": "b"}}
    harmless |= {fields.SPECIAL_TOKENS: path == "completions"}
    assert (await oai.post(path, json=body(**harmless))).status_code == 200
    other_way = await oai.post(path, json=body(**{fields.SPECIAL_TOKENS: path != "completions"}))
    assert (other_way.status_code, other_way.json()["error"]["code"]) == (400, field_checks.OTHER_VALUE)


@both
async def test_options_of_streams_are_judged_likewise(oai, path, body):
    harmless = {"include_usage": True, "include_obfuscation": False, "continuous_usage_stats": None}
    assert (await oai.post(path, json=body(stream=True, stream_options=harmless))).status_code == 200
    for name in ("include_obfuscation", "continuous_usage_stats", "include_useage"):
        refused = await oai.post(path, json=body(stream=True, stream_options={name: True}))
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, f"stream_options.{name}")


LONG = "x" * 100_000


@both
@pytest.mark.parametrize("more", [{LONG: 1}, {"model": LONG}], ids=["field", "model"])
async def test_errors_do_not_repeat_long_names_in_full(oai, path, body, more):
    refused = await oai.post(path, json=body() | more)
    assert refused.status_code in (400, 404)
    assert "xxx" in refused.text
    assert len(refused.text) < 2000


NESTED = [
    ({"chat_template_kwargs": {"enable_thinking": False}}, "chat_template_kwargs"),
    ({"chat_template_kwargs": {"add_generation_prompt": False}}, "chat_template_kwargs"),
    ({"chat_template_kwargs": {"chat_template": "x"}}, "chat_template_kwargs"),
    ({"chat_template_kwargs": {"documents": []}}, "chat_template_kwargs"),
    ({"reasoning_effort": "low"}, "reasoning_effort"),
    ({"top_logprobs": "x"}, "top_logprobs"),
    ({"messages": [{"role": "user", "content": "a", "name": "Bob"}]}, "messages"),
    ({"messages": [{"role": "assistant", "content": "a", "reasoning_content": "b"}]}, "messages"),
]


@pytest.mark.parametrize("logprobs", [None, False])
async def test_no_likeliest_tokens_need_no_log_probabilities(oai, logprobs):
    taken = await oai.post("chat/completions", json=chat(logprobs=logprobs, top_logprobs=0))
    assert (taken.status_code, taken.json()["choices"][0]["logprobs"]) == (200, None)
    refused = await oai.post("chat/completions", json=chat(logprobs=logprobs, top_logprobs=1))
    assert refused.status_code == 400


async def test_nested_objects_of_chats_are_judged_likewise(oai):
    for more, param in NESTED:
        refused = await oai.post("chat/completions", json=chat(**more))
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, param)


async def test_a_field_of_the_wrong_type_is_named(oai):
    error = (await oai.post("completions", json=completion(n="many"))).json()["error"]
    assert (error["param"], error["type"]) == ("n", "invalid_request_error")


@pytest.mark.parametrize(
    "params, served",
    [
        (chat_create_params.CompletionCreateParamsBase, ChatRequest),
        (completion_create_params.CompletionCreateParamsBase, CompletionRequest),
    ],
    ids=["chat", "completions"],
)
def test_every_field_of_openais_is_known(params, served):
    judged = {*served.__struct_fields__, *fields.DEFAULTS, *fields.LABELS}
    assert set(params.__annotations__) - judged == set()


def test_the_documentation_has_every_field_that_is_taken():
    told = set(re.findall(r"`([a-z_.]+)`", DOCS.read_text()))
    served = {*ChatRequest.__struct_fields__, *CompletionRequest.__struct_fields__}
    assert served | fields.DEFAULTS.keys() | fields.LABELS.keys() | {fields.SPECIAL_TOKENS} <= told


async def test_openais_client_may_send_all_of_its_defaults(oai):
    async with openai.AsyncOpenAI(
        base_url="http://server/oai/api/v1", api_key="tml-x", http_client=oai
    ) as client:
        answer = await client.chat.completions.create(
            model=BASE_MODEL,
            messages=[{"role": "user", "content": "hi"}],
            max_tokens=2,
            n=1,
            frequency_penalty=0,
            presence_penalty=0,
            parallel_tool_calls=True,
            response_format={"type": "text"},
            store=False,
            user="me",
            metadata={"run": "1"},
            tool_choice="auto",
            service_tier="auto",
        )
    assert answer.choices[0].finish_reason == "length"
