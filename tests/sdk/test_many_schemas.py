"""A model that knows nothing answers in JSON of a thousand schemas.

Run by ``pytest -m slow tests/sdk/test_many_schemas.py``.
"""

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import httpx
import pytest

from spmd_tx.coordinator.text.chat_template import TEMPLATE
from spmd_tx.demo import tiny_model
from tests.sdk.examples import SECONDS
from tests.sdk.server import BASE_MODEL, Server, serving
from tests.sdk.shared_servers import SPEC
from tests.support.chat_templates import QWEN3
from tests.support.schema_corpus import is_valid, schemas

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

SCHEMAS = 1000
CONTEXT = 4096  # tokens
TOGETHER = 8  # requests
SEEDS = 4  # that are tried until an answer comes to its end


@pytest.fixture(scope="module")
def long_server(tmp_path_factory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("schemas")
    model = tiny_model.write(folder / "model", replace(SPEC, max_positions=CONTEXT))
    (model / TEMPLATE).write_text(QWEN3)
    with serving(model, folder / "data") as server:
        server.wait_until_ready()
        yield server


def test_all_answers_are_valid(long_server):
    headers = {"x-api-key": "tml-test"}
    corpus = [*schemas(SCHEMAS, seed=1)]
    with (
        httpx.Client(base_url=long_server.url, headers=headers, timeout=SECONDS) as http,
        ThreadPoolExecutor(TOGETHER) as threads,
    ):
        answers = [*threads.map(lambda schema: answer(http, schema), corpus)]
    wrong = [
        (schema, text)
        for schema, text in zip(corpus, answers, strict=True)
        if text is None or not is_valid(json.loads(text), schema, schema)
    ]
    assert not wrong, f"{len(wrong)} of {len(corpus)}, such as {wrong[0]}"


def answer(http: httpx.Client, schema: object) -> str | None:
    """Return the first answer that was not cut off; None: all were."""
    form = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, "strict": True}}
    asked = {
        "model": BASE_MODEL,
        "messages": [{"role": "user", "content": "Answer."}],
        "response_format": form,
        "chat_template_kwargs": {"enable_thinking": False},
        "max_tokens": CONTEXT // 2,
        "temperature": 1,
    }
    for seed in range(SEEDS):
        got = http.post("/oai/api/v1/chat/completions", json=asked | {"seed": seed})
        assert got.is_success, f"{got.text} of {schema}"
        (choice,) = got.json()["choices"]
        if choice["finish_reason"] == "stop":
            return choice["message"]["content"]
    return None
