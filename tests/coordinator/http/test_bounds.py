"""Bodies, names and addresses that are too large, too deep or not what they say, on real sockets."""

import pytest
import zstandard

from tests.coordinator.http.real_server import answer_of, connected, is_well, nested, sqlite_only
from tests.coordinator.http.real_server import client as client  # a fixture
from tests.coordinator.http.real_server import connections as connections  # a fixture
from tests.coordinator.http.real_server import port as port  # a fixture

pytestmark = sqlite_only


@pytest.mark.parametrize("field", ["user_metadata", "unknown"])
async def test_json_without_a_bottom_is_refused(client, field):
    bodies = "create_session create_model optim_step save_weights asample sessions/search retrieve_future"
    for path in bodies.split():
        body, headers = nested(field), {"content-type": "application/json"}
        response = await client.post(path, content=body, headers=headers)
        assert response.status_code == 400, (path, response.text)
        assert await is_well(client), path


@pytest.mark.parametrize(
    "metadata, complaint",
    [
        ({"a": {"b": [[[[[[[[[[[[[[[[[[[[]]]]]]]]]]]]]]]]]]]]}}, "nested more than 20"),
        ({"a": "x" * (64 << 10)}, "at most 65536"),
    ],
    ids=["deep", "large"],
)
async def test_metadata_is_bounded(client, model_id, metadata, complaint):
    for path, body in {
        "create_session": {},
        "save_weights": {"model_id": model_id, "seq_id": 1, "path": "a"},
    }.items():
        response = await client.post(path, json=body | {"user_metadata": metadata})
        assert response.status_code == 400
        assert complaint in response.json()["detail"]


@pytest.mark.parametrize("field", ["display_name", "project_id", "sdk_version"])
async def test_labels_are_bounded(client, field):
    assert (await client.post("create_session", json={field: "ö" * 1000})).status_code == 200
    for value in ("x" * 1001, "a\\u0000b", "\\ud800"):
        body = f'{{"{field}": "{value}"}}'
        headers = {"content-type": "application/json"}
        assert (await client.post("create_session", content=body, headers=headers)).status_code == 400


NAMES = [
    "..",
    ".",
    "%2e%2e",
    "..%2f..%2fetc",
    "%00",
    "a%00b",
    "%0a",
    "%1b[31m",
    "%ff%fe",
    "%e2%80%ae",
    "a\\b",
]


async def test_tricks_in_addresses_find_nothing(port, client, model_id):
    """Sent as they are: httpx would tidy them up."""
    for name in (*NAMES, "x" * 300, "x" * 20_000, "%F0%9F%92%A9" * 100):
        for path in (
            f"training_runs/{model_id}/checkpoints/weights/{name}",
            f"training_runs/{name}/checkpoints/weights/a",
            f"training_runs/{model_id}/checkpoints/{name}/a/archive",
            f"sessions/{name}/trace_export",
            f"downloads/files/{model_id}/weights/a/v/{name}",
        ):
            for method in ("GET", "DELETE"):
                async with connected(port) as (reader, writer):
                    ask = f"{method} /api/v1/{path} HTTP/1.1\r\nhost: s\r\nconnection: close\r\n\r\n"
                    writer.write(ask.encode())
                    status = int((await answer_of(reader)).split()[1])
                assert status in (400, 403, 404, 405), path
        assert await is_well(client), name


async def test_tricks_in_names_of_checkpoints_are_refused(client, model_id):
    for name in ("..", "a/b", "a\\b", ".hidden", "a\nb", "a\x1b[31mb", "\u202e", "", "x" * 300):
        for path in (name, f"tinker://{model_id}/weights/{name}", f"tinker://{name}/weights/a"):
            response = await client.post("weights_info", json={"tinker_path": path})
            assert response.status_code in (400, 404), path


async def test_a_body_in_pieces_of_unknown_length_is_bounded(client):
    async def pieces():
        for _ in range(70):
            yield b" " * (1 << 20)

    response = await client.post(
        "create_session", content=pieces(), headers={"content-type": "application/json"}
    )
    assert response.status_code == 413


async def test_telemetry_is_taken_and_dropped(client, services):
    events = [{"event": "GENERIC_EVENT", "event_data": "x" * 1000}] * 900
    for body in ({"events": events}, {"anything": None}):
        assert (await client.post("telemetry", json=body)).json() == {"status": "accepted"}
    assert (await client.post("telemetry", content=b"no json")).status_code == 200


@pytest.mark.parametrize("path", ["telemetry", "retrieve_futures", "sessions/search"])
async def test_what_changes_nothing_is_short(client, path):
    response = await client.post(path, content=b" " * ((1 << 20) + 1))
    assert response.status_code == 413
    assert response.json()["detail"] == "the body is larger than 1024 KiB"


def frame(size: int, **parameters: object) -> bytes:
    return zstandard.ZstdCompressor(**parameters).compress(bytes(size))


def with_size(announced: int) -> bytes:
    """A frame of 1000 bytes whose header says something else, in two bytes that count from 256."""
    body = bytearray(frame(1000))
    body[5:7] = (announced - 256).to_bytes(2, "little")
    return bytes(body)


@pytest.mark.parametrize(
    "body, complaint",
    [
        (with_size(999), ""),
        (with_size(60_000), ""),
        (frame(1000) * 2, "more than one frame"),
        (frame(1000) + b"what is this", "not a zstd frame"),
        (frame(200 << 20), "more than 128 MiB"),
        (frame(40 << 20) * 4, "more than 128 MiB"),
        (frame(200 << 20, write_content_size=False), "more than 128 MiB"),
        (b"\x28\xb5\x2f\xfd\x00\xf8" + bytes(20), "not a zstd frame"),  # a window of 2 TiB
        (frame(0) * 100_000, None),  # a request for no model
    ],
    ids=["less", "more", "two", "tail", "bomb", "frames", "unannounced", "window", "empty frames"],
)
async def test_compressed_bodies_that_lie_are_refused(client, body, complaint):
    headers = {"content-type": "application/x-protobuf", "content-encoding": "zstd"}
    response = await client.post("forward_backward", content=body, headers=headers)
    assert response.status_code == (400 if complaint is not None else 404)
    assert (complaint or "") in response.json()["detail"]
    assert await is_well(client)


@pytest.mark.parametrize("path", ["create_session", "forward"])
async def test_bodies_that_are_no_text_are_refused(client, path):
    headers = {"content-type": "application/json"}
    response = await client.post(path, content=b'{"model_id": "\xff"}', headers=headers)
    assert response.status_code == 400
    assert "'utf-8' codec can't decode byte 0xff" in response.json()["detail"]


@pytest.mark.parametrize("path", ["completions", "chat/completions"])
async def test_openai_bodies_without_a_bottom_are_refused_in_its_words(client, path):
    headers = {"content-type": "application/json"}
    url = str(client.base_url).replace("/api/v1/", f"/oai/api/v1/{path}")
    response = await client.post(url, content=nested("messages"), headers=headers)
    assert response.status_code == 400
    assert "nested too deeply" in response.text
