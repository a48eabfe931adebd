"""Everything below /oai answers in OpenAI's form, also where there is no route."""

from itertools import product
from urllib.parse import quote

import httpx
import openai
import pytest

from spmd_tx.errors import TooManyRequests
from tests.coordinator.http.openai.test_routes import BASE_MODEL, completion


@pytest.fixture
def oai(api):
    api.base_url = httpx.URL("http://server/oai/api/v1/")
    return api


async def test_where_there_is_no_route_the_error_has_openais_form(oai):
    paths = ("/oai", "/oai/", "/oai/api", "/oai/api/v1", "responses/x", "embeddings", "chat", "files/x")
    for method, path in product(("GET", "POST", "PUT", "DELETE", "PATCH"), paths):
        response = await oai.request(method, path, json={})
        error = response.json()["error"]
        assert (response.status_code, error["type"], error["code"]) == (404, "invalid_request_error", None)
        assert method in error["message"]


async def test_a_method_that_a_route_lacks_has_openais_form(oai):
    for method, path, allowed in (
        ("GET", "completions", "POST"),
        ("PUT", "chat/completions", "POST"),
        ("DELETE", "models", "GET"),
        ("DELETE", f"models/{BASE_MODEL}", "GET"),
    ):
        response = await oai.request(method, path)
        assert (response.status_code, response.json()["error"]["type"]) == (405, "invalid_request_error")
        assert allowed in response.headers["allow"]


async def test_other_routes_keep_their_own_form(api):
    response = await api.get("/oaix")
    assert (response.status_code, response.json()["category"]) == (404, "user")


@pytest.mark.parametrize("written", [BASE_MODEL, quote(BASE_MODEL, safe="")])
async def test_a_model_is_found_by_its_name_with_slashes(oai, written):
    response = await oai.get(f"models/{written}")
    assert (response.status_code, response.json()["id"], response.json()["object"]) == (
        200,
        BASE_MODEL,
        "model",
    )


@pytest.mark.parametrize(
    "name",
    [
        "gpt-5",
        "gpt-5;tinker://nobody/sampler_weights/x",
        "a/b/c",
        "/tmp/model",
        "tinker://nobody/sampler_weights/x",
        "%",
        "ü?#",
    ],
)
async def test_an_unknown_model_is_named_in_openais_form(oai, name):
    async with openai.AsyncOpenAI(
        base_url="http://server/oai/api/v1", api_key="tml-x", http_client=oai, max_retries=0
    ) as client:
        with pytest.raises(openai.NotFoundError) as caught:
            await client.models.retrieve(name)
    assert (caught.value.code, caught.value.type) == ("model_not_found", "not_found_error")
    assert name.partition(";")[0] in caught.value.body["message"] or "nobody" in caught.value.body["message"]


async def test_what_other_headers_say_is_not_lost(services, oai):
    services.quotas._check_backlog = too_many
    response = await oai.post("completions", json=completion())
    assert (response.status_code, response.json()["error"]["code"]) == (429, "rate_limit_exceeded")
    assert response.headers["retry-after"] == "7"


async def too_many(*_):
    raise TooManyRequests("too many", 7)
