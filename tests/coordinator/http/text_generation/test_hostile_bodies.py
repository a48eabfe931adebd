"""What no client would send fails alone, in the words of its dialect."""

import json

import httpx
import pytest

from tests.coordinator.http.real_server import sqlite_only
from tests.coordinator.http.text_generation.drawing import TEMPLATE, Drawing

pytestmark = sqlite_only  # nothing depends on the database

BASE_MODEL = "Qwen/Qwen3-0.6B"
MESSAGES, RESPONSES, CHAT = (
    "anthropic/api/v1/messages",
    "oai/api/v1/responses",
    "oai/api/v1/chat/completions",
)
WIDE = "x" * (1 << 20)
DEEP = 50_000


@pytest.fixture
def server(api, services):
    (services.bases.default.model.directory / "chat_template.jinja").write_text(TEMPLATE)
    api.base_url = httpx.URL("http://server/")
    return api


def user(content):
    return [{"role": "user", "content": content}]


def thinking(signature, **more):
    block = {"type": "thinking", "thinking": "hm", "signature": signature, **more}
    return [*user("a"), {"role": "assistant", "content": [block]}, *user("b")]


def nested(begin, end):
    return begin * DEEP + end * DEEP


HOSTILE = {
    "blanks": [
        (MESSAGES, {"messages": user(" " * 100_000)}),
        (RESPONSES, {"input": " " * 100_000}),
        (CHAT, {"messages": user(" " * 100_000)}),
    ],
    "megabytes of tools": [
        (MESSAGES, {"messages": user("a"), "tools": [{"name": "f", "description": WIDE}]}),
        (RESPONSES, {"input": "a", "tools": [{"type": "function", "name": "f", "description": WIDE}]}),
        (CHAT, {"messages": user("a"), "tools": [{"type": "function", "function": {"name": WIDE}}]}),
    ],
    "ten thousand tools": [
        (MESSAGES, {"messages": user("a"), "tools": [{"name": f"f{number}"} for number in range(10_000)]}),
    ],
    "halves of characters": [
        (MESSAGES, {"messages": user("\ud800")}),
        (RESPONSES, {"input": "\ud800"}),
    ],
    "results of nothing": [
        (MESSAGES, {"messages": user([{"type": "tool_result", "tool_use_id": WIDE}])}),
        (RESPONSES, {"input": [{"type": "function_call_output", "call_id": WIDE, "output": "a"}]}),
    ],
    "thoughts that are none": [
        (MESSAGES, {"messages": thinking("c3R1Yg==", thinking=5)}),
        (RESPONSES, {"input": [{"type": "reasoning", "summary": [5], "encrypted_content": "c3R1Yg=="}]}),
    ],
    "names of many fields": [
        (MESSAGES, {"messages": user("a"), **{f"{WIDE[:500]}{number}": 1 for number in range(1000)}}),
    ],
}


def is_refused(path, response):
    body = response.json()
    words = body["error"]["message"]
    assert len(words) < 2000
    assert "internal error" not in words
    return response.status_code == 400 and (body.get("type") == "error") == (path == MESSAGES)


@pytest.mark.parametrize("name", HOSTILE)
async def test_it_is_refused_in_the_words_of_its_dialect(server, name):
    for path, body in HOSTILE[name]:
        content = json.dumps({"model": BASE_MODEL, "max_tokens": 1, **body}).encode()
        if path == RESPONSES:
            content = json.dumps({"model": BASE_MODEL, **body}).encode()
        response = await server.post(path, content=content, headers={"content-type": "application/json"})
        assert is_refused(path, response), (path, response.text[:500])


@pytest.mark.parametrize(("path", "key"), [(MESSAGES, "messages"), (RESPONSES, "input"), (CHAT, "messages")])
async def test_what_is_nested_too_deeply_is_refused(server, path, key):
    for begin, end in ((b"[", b"]"), (b'{"a":', b"}")):
        content = b'{"model":"x","max_tokens":1,"%s":%s}' % (key.encode(), nested(begin, end or b""))
        response = await server.post(path, content=content, headers={"content-type": "application/json"})
        assert is_refused(path, response), response.text[:500]


@pytest.mark.parametrize("signature", ["c3R1Yg==", "A" * (1 << 20), "ü", "-", ""])
async def test_a_forged_signature_names_no_turn_and_the_text_counts(server, services, tokenizer, signature):
    drawing = Drawing(services, tokenizer)
    body = {"model": BASE_MODEL, "max_tokens": 1, "messages": thinking(signature)}
    response = await drawing.answer(server.post(MESSAGES, json=body), "ok")
    assert response.status_code == 200
    assert "hm" in await drawing.prompt()
