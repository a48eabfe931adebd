from datetime import UTC, datetime, timedelta

import msgspec
import pytest
from sqlalchemy import select

from spmd_tx.coordinator.requests.logged_images import LoggedImages
from spmd_tx.coordinator.storage.tables import UsageRow
from spmd_tx.coordinator.wire import tinker_pb2 as pb
from spmd_tx.coordinator.wire.sampling import SampleRequest
from spmd_tx.coordinator.wire.training_protobuf import decode_forward_backward
from tests.coordinator.http.tinker.test_sampling import sample, sampler_id  # noqa: F401
from tests.coordinator.http.tinker.test_training import PROTOBUF
from tests.support.pictures import in_json, let_see, png

PNG = png(64, 96)  # 6 tokens
IMAGE = in_json(PNG) | {"expected_tokens": 6}
TEXT = {"tokens": [1, 2], "type": "encoded_text"}


@pytest.fixture
def sees(services):
    let_see(services.bases.default)


@pytest.fixture
def images(services, tmp_path):
    return LoggedImages(services.database, tmp_path / "payloads")


async def test_a_sample_with_an_image_is_logged_with_a_reference(api, sampler_id, services, sees, images):  # noqa: F811
    services.scheduler.is_paused = True
    answer = await api.post("asample", json=sample(sampler_id, prompt={"chunks": [TEXT, IMAGE, TEXT]}))
    assert answer.status_code == 200, answer.text
    request = services.scheduler.arrived[-1]
    body = await services.queue.payload(request)
    logged = msgspec.json.decode(body, type=SampleRequest)
    (placed,) = logged.prompt.images
    assert (logged.prompt.length, placed.first, placed.tokens) == (10, 2, 6)
    assert len(body) < 1000
    key = await images.key(request.session_id, placed.digest)
    assert (await images.read(key)).content == PNG


async def test_usage_counts_images_beside_tokens(api, sampler_id, services, sees):  # noqa: F811
    for number, images in enumerate([[IMAGE, IMAGE], [IMAGE], []]):
        body = sample(sampler_id, seq_id=number, prompt={"chunks": [TEXT, *images, TEXT]})
        future = (await api.post("asample", json=body)).json()
        await api.post("retrieve_future", json={"request_id": future["request_id"]})
    async with services.database.reading() as db:
        (row,) = await db.scalars(select(UsageRow))
    assert row.images == 2  # the same one twice is one image of a request
    hour = datetime.fromtimestamp(row.hour, UTC)
    window = {"starting_on": hour.isoformat(), "ending_before": (hour + timedelta(hours=1)).isoformat()}
    events = (await api.get("billing/usage/events", params=window)).json()["data"]
    assert sum(event["image_count"] for event in events) == 2


async def test_a_wrong_count_is_refused_at_once(api, sampler_id, sees):  # noqa: F811
    chunks = [TEXT, IMAGE | {"expected_tokens": 7}, TEXT]
    answer = await api.post("asample", json=sample(sampler_id, prompt={"chunks": chunks}))
    assert answer.status_code == 400
    assert "chunk 1 of the prompt: expected_tokens is 7 and the image has 6" in answer.json()["detail"]


async def test_a_model_of_text_refuses_images_as_ever(api, sampler_id):  # noqa: F811
    answer = await api.post("asample", json=sample(sampler_id, prompt={"chunks": [TEXT, IMAGE, TEXT]}))
    assert answer.status_code == 400
    assert "a chunk of kind 'image'; this model takes text" in answer.json()["detail"]


async def test_the_body_of_a_prompt_may_be_larger_where_models_see(api, sampler_id, services, sees):  # noqa: F811
    bounds = services.config.bounds
    filler = IMAGE | {"data": "A" * (bounds.prompt_body_bytes + 4)}
    answer = await api.post("asample", json=sample(sampler_id, prompt={"chunks": [TEXT, filler, TEXT]}))
    assert answer.status_code == 400
    assert "neither PNG nor JPEG" in answer.json()["detail"]


def training(model_id, chunks, seq_id=1):
    text = pb.Chunk(encoded_text=pb.EncodedTextChunk(tokens=bytes(8)))
    datum = pb.Datum(model_input=[text, *chunks, text])
    return pb.ForwardBackwardRequest(
        model_id=model_id, seq_id=seq_id, data=[datum], loss_fn="cross_entropy"
    ).SerializeToString()


async def trained(api, services, model_id, image):
    services.scheduler.is_paused = True
    body = training(model_id, [pb.Chunk(image=image)])
    answer = await api.post("forward_backward", content=body, headers=PROTOBUF)
    assert answer.status_code == 200, answer.text
    request = services.scheduler.arrived[-1]
    (datum,) = decode_forward_backward(await services.queue.payload(request)).data
    return request, datum


async def test_a_datum_with_an_image_is_logged_with_a_reference(api, model_id, services, sees, images):
    request, datum = await trained(api, services, model_id, pb.ImageChunk(data=PNG, format="png"))
    (placed,) = datum.images
    assert len(datum.tokens) == 10
    assert (await images.read(await images.key(request.session_id, placed.digest))).content == PNG


async def test_a_wrong_image_fails_its_future_and_not_the_post(api, model_id, services, sees):
    _, datum = await trained(api, services, model_id, pb.ImageChunk(data=b"hello", format="png"))
    assert "neither PNG nor JPEG" in datum.problem


async def test_a_model_of_text_logs_what_was_sent(api, model_id, services):
    _, datum = await trained(api, services, model_id, pb.ImageChunk(data=PNG, format="png"))
    assert "a chunk of kind 'image'; send encoded_text chunks, and to models that see" in datum.problem


async def test_the_json_of_old_clients_has_images_too(api, model_id, services, sees):
    services.scheduler.is_paused = True
    chunks = [TEXT, IMAGE, TEXT]
    loss = {"data": [{"model_input": {"chunks": chunks}, "loss_fn_inputs": {}}], "loss_fn": "cross_entropy"}
    body = {"model_id": model_id, "seq_id": 1, "forward_backward_input": loss}
    answer = await api.post("forward_backward", json=body)
    assert answer.status_code == 200, answer.text
    (datum,) = decode_forward_backward(await services.queue.payload(services.scheduler.arrived[-1])).data
    assert [image.tokens for image in datum.images] == [6]
