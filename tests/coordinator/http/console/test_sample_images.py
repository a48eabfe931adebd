import pytest

from tests.coordinator.http.console.test_samples import Sampling, group, page
from tests.coordinator.http.console.test_timeline import BASE_MODEL
from tests.coordinator.http.real_server import sqlite_only
from tests.support.pictures import in_json, jpeg, let_see, png

pytestmark = sqlite_only

PNG, JPEG = png(64, 96), jpeg(32, 64)  # 6 and 2 tokens


@pytest.fixture
async def request_id(api, services, session_id):
    """A request with two images."""
    let_see(services.bases.default)
    sampling = Sampling(api, session_id)
    chunks = [
        in_json(each) if isinstance(each, bytes) else {"tokens": [each]} for each in (1, PNG, 2, JPEG, 3)
    ]
    body = {
        "prompt": {"chunks": chunks},
        "sampling_session_id": await sampling.sampler(base_model=BASE_MODEL),
        "seq_id": 0,
        "sampling_params": {"max_tokens": 2},
    }
    id = (await api.post("asample", json=body)).raise_for_status().json()["request_id"]
    await api.post("retrieve_future", json={"request_id": id})
    return id


async def get(api, model_id, request_id, number):
    return await api.get(f"http://server/console/api/runs/{model_id}/samples/{request_id}/images/{number}")


async def test_a_prompt_with_images_is_shown(api, model_id, request_id):
    shown = await group(api, model_id, request_id)
    sizes = [(each["number"], each["tokens"], each["width"], each["height"]) for each in shown["images"]]
    assert sizes == [(0, 6, 96, 64), (1, 2, 64, 32)]
    assert shown["images"][0]["size"] == len(PNG)
    assert len(shown["prompt"]["tokens"]) == 3 + 6 + 2
    assert shown["prompt"]["texts"].count("[image]") == 2
    (listed,) = (await page(api, model_id))["requests"]
    assert listed["prompt"]["tokens"] == 11
    assert listed["prompt"]["text"].count("[image]") == 2


async def test_an_image_is_sent_as_it_came_and_runs_nothing(api, model_id, request_id):
    for number, (content, kind) in enumerate([(PNG, "image/png"), (JPEG, "image/jpeg")]):
        answer = await get(api, model_id, request_id, number)
        assert answer.content == content
        assert answer.headers["content-type"].partition(";")[0] == kind
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert answer.headers["content-security-policy"] == "default-src 'none'; sandbox"


@pytest.mark.parametrize("number", [2, -1])
async def test_an_image_that_is_not_there_is_not_found(api, model_id, request_id, number):
    assert (await get(api, model_id, request_id, number)).status_code == 404


async def test_others_do_not_see_an_image(api, model_id, request_id, client_for):
    mallory = await client_for("mallory")
    assert (await get(mallory, model_id, request_id, 0)).status_code == 404
