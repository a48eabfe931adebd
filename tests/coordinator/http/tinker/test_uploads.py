"""Weights from outside: files are sent to signed URLs, in parts if need be, and become a checkpoint."""

import base64
import hashlib
import os
from dataclasses import replace

import pytest

from spmd_tx.coordinator.bases.bases import Bases
from spmd_tx.coordinator.checkpoints import uploads as stored
from spmd_tx.models.adapter_formats.files import CONFIG_FILE, WEIGHTS_FILE
from spmd_tx.protocol.commands import AdapterSpec
from tests.coordinator.conftest import BASE_MODEL, TINY_MODEL
from tests.coordinator.http.tinker.test_checkpoints import load, result
from tests.support.adapter_folders import write_folder

ADAPTER = AdapterSpec(rank=8, alpha=16.0)
pytestmark = pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)


@pytest.fixture
def folder(tmp_path):
    return write_folder(tmp_path / "sent", ADAPTER, TINY_MODEL, BASE_MODEL)


async def start(api, **more):
    body = {"base_model": BASE_MODEL, "lora_config": {"rank": 8}, **more}
    return await api.post("external_weights_upload_start", json=body)


@pytest.fixture
async def upload(api):
    return (await start(api)).raise_for_status().json()


async def send(api, upload, folder, *names):
    for name in names or upload["urls"]:
        headers = {"Content-Type": "application/x-www-form-urlencoded"}  # what urllib says of any body
        answer = await api.put(upload["urls"][name], content=(folder / name).read_bytes(), headers=headers)
        assert answer.status_code == 200, answer.text


async def finish(api, upload):
    return await api.post("external_weights_upload_finish", json={"upload_id": upload["upload_id"]})


async def uploaded(api, upload, folder):
    await send(api, upload, folder)
    return (await finish(api, upload)).raise_for_status().json()["tinker_path"]


def left_of(services, upload):
    return services.config.data_dir / stored.FOLDER / upload["upload_id"]


async def test_an_upload_becomes_an_external_checkpoint_that_loads(api, upload, folder, session_id, services):
    assert set(upload["urls"]) == {CONFIG_FILE, WEIGHTS_FILE}
    path = await uploaded(api, upload, folder)
    run_id = path.removeprefix("tinker://").partition("/")[0]
    assert path == f"tinker://{run_id}/external_weights/upload"
    (listed,) = (await api.get("checkpoints")).json()["checkpoints"]
    assert (listed["tinker_path"], listed["checkpoint_type"]) == (path, "external")
    info = (await api.post("weights_info", json={"tinker_path": path})).json()
    assert (info["base_model"], info["lora_rank"]) == (BASE_MODEL, 8)
    assert (await api.get(f"training_runs/{run_id}")).json()["lora_rank"] == 8
    loaded = await result(api, "load_weights", {**load(session_id, path), "optimizer": False})
    assert loaded["path"] == path
    assert (await services.catalog.model(loaded["model_id"])).alpha == 16.0
    assert not left_of(services, upload).exists()


async def test_what_was_uploaded_can_be_downloaded(api, upload, folder):
    path = await uploaded(api, upload, folder)
    address = path.removeprefix("tinker://").replace("/", "/checkpoints/", 1)
    urls = (await api.get(f"training_runs/{address}/external_weights_urls")).json()["urls"]
    for name, url in urls.items():
        assert (await api.get(url)).content == (folder / name).read_bytes()


async def test_finishing_again_gives_the_same_checkpoint(api, upload, folder):
    path = await uploaded(api, upload, folder)
    assert (await finish(api, upload)).json()["tinker_path"] == path
    assert len((await api.get("checkpoints")).json()["checkpoints"]) == 1


async def test_half_an_upload_is_nowhere_to_be_seen(api, upload, folder):
    await send(api, upload, folder, CONFIG_FILE)
    answer = await finish(api, upload)
    assert answer.status_code == 400
    assert f"{WEIGHTS_FILE} (0 bytes so far)" in answer.json()["detail"]
    assert (await api.get("checkpoints")).json()["checkpoints"] == []
    assert (await api.get("training_runs")).json()["training_runs"] == []
    await send(api, upload, folder, WEIGHTS_FILE)
    (await finish(api, upload)).raise_for_status()


async def test_a_file_may_come_in_parts_and_go_on_where_it_broke_off(api, upload, folder):
    url, content = upload["urls"][WEIGHTS_FILE], (folder / WEIGHTS_FILE).read_bytes()
    total = len(content)

    async def put(first, end):
        headers = {"Content-Range": f"bytes {first}-{end - 1}/{total}"}
        return await api.put(url, content=content[first:end], headers=headers)

    first = await put(0, 1000)
    assert (first.status_code, first.headers["range"]) == (308, "bytes=0-999")
    gap = await put(2000, total)
    assert (gap.status_code, gap.headers["range"]) == (308, "bytes=0-999")
    asked = await api.put(url, headers={"Content-Range": f"bytes */{total}"})
    assert (asked.status_code, asked.headers["range"]) == (308, "bytes=0-999")
    assert (await put(500, total)).status_code == 200  # what has arrived twice is replaced
    await send(api, upload, folder, CONFIG_FILE)
    (await finish(api, upload)).raise_for_status()


async def test_what_a_client_sent_until_it_was_gone_is_kept(api, upload, folder):
    url, content = upload["urls"][WEIGHTS_FILE], (folder / WEIGHTS_FILE).read_bytes()

    async def pieces():
        yield content[:1000]
        raise ConnectionResetError

    answer = await api.put(url, content=pieces(), headers={"Content-Length": str(len(content))})
    assert answer.status_code == 503
    asked = await api.put(url, headers={"Content-Range": f"bytes */{len(content)}"})
    assert asked.headers["range"] == "bytes=0-999"


async def test_a_wrong_digest_drops_what_came_with_it(api, upload, folder):
    url, content = upload["urls"][WEIGHTS_FILE], (folder / WEIGHTS_FILE).read_bytes()
    right = base64.b64encode(hashlib.md5(content).digest()).decode()
    answer = await api.put(url, content=content[::-1], headers={"Content-MD5": right})
    assert answer.status_code == 400
    assert "Content-MD5" in answer.json()["detail"]
    asked = await api.put(url, headers={"Content-Range": "bytes */1"})
    assert (asked.status_code, "range" in asked.headers) == (308, False)
    assert (await api.put(url, content=content, headers={"Content-MD5": right})).status_code == 200


async def test_a_file_is_as_large_as_its_adapter_can_be(api, upload):
    url = upload["urls"][CONFIG_FILE]
    most = 1 << 20
    assert (await api.put(url, content=b" " * most)).status_code == 200

    async def endless():
        while True:
            yield bytes(1 << 16)

    for content in (b" " * (most + 1), endless()):
        answer = await api.put(url, content=content)
        assert answer.status_code == 413
        assert str(most) in answer.json()["detail"]


async def test_what_goes_beyond_its_range_is_dropped(api, upload):
    url = upload["urls"][CONFIG_FILE]

    async def pieces():
        yield b" " * 100

    answer = await api.put(url, content=pieces(), headers={"Content-Range": "bytes 0-9/50"})
    assert answer.status_code == 400
    assert "100 bytes of adapter_config.json came, and Content-Range says 10" in answer.json()["detail"]
    asked = await api.put(url, headers={"Content-Range": "bytes */50"})
    assert (asked.status_code, "range" in asked.headers) == (308, False)


@pytest.mark.parametrize("text", ["bytes 5-4/9", "bytes 0-9/9", "items 0-1/2", "bytes 0-1/*"])
async def test_a_range_that_makes_no_sense_is_refused(api, upload, text):
    answer = await api.put(upload["urls"][CONFIG_FILE], content=b"{}", headers={"Content-Range": text})
    assert answer.status_code == 400


async def test_files_that_are_not_what_was_announced_can_be_sent_anew(api, upload, folder, tmp_path):
    wrong = write_folder(tmp_path / "wrong", AdapterSpec(rank=4), TINY_MODEL, BASE_MODEL)
    await send(api, upload, wrong)
    answer = await finish(api, upload)
    assert answer.status_code == 400
    assert "is 4, and lora_config.rank is 8" in answer.json()["detail"]
    assert (await api.get("training_runs")).json()["training_runs"] == []
    await uploaded(api, upload, folder)


@pytest.mark.parametrize(
    "more, message",
    [
        ({"base_model": "Qwen/Qwen3-4B"}, "'Qwen/Qwen3-4B'; this server serves 'Qwen/Qwen3-0.6B' only"),
        ({"lora_config": {"rank": 64}}, "rank is 64; it must be between 1 and 16"),
    ],
)
async def test_what_cannot_be_served_is_refused_at_the_start(api, more, message):
    answer = await start(api, **more)
    assert answer.status_code == 400
    assert message in answer.json()["detail"]


async def test_an_upload_belongs_to_its_owner_and_so_does_its_checkpoint(client_for, folder):
    alice, mallory = await client_for("alice"), await client_for("mallory")
    upload = (await start(alice)).json()
    await send(alice, upload, folder)
    assert (await finish(mallory, upload)).status_code == 404
    path = (await finish(alice, upload)).json()["tinker_path"]
    assert (await finish(mallory, upload)).status_code == 404
    assert (await mallory.post("weights_info", json={"tinker_path": path})).status_code == 404
    assert (await alice.post("weights_info", json={"tinker_path": path})).status_code == 200


async def test_a_url_is_for_one_file_and_ends_with_the_upload(api, upload, folder, services, monkeypatch):
    url = upload["urls"][CONFIG_FILE]
    assert (await api.put(url.replace(CONFIG_FILE, WEIGHTS_FILE), content=b"")).status_code == 403
    monkeypatch.setattr("spmd_tx.coordinator.checkpoints.uploads.time.time", lambda: 1e12)
    assert (await api.put(url, content=b"{}")).status_code == 404
    assert (await finish(api, upload)).status_code == 404


async def test_an_owner_has_a_bounded_number_of_unfinished_uploads(api, upload, folder, services):
    services.uploads._uploads._most_open = 1
    answer = await start(api)
    assert answer.status_code == 400
    assert "1 unfinished uploads" in answer.json()["detail"]
    await uploaded(api, upload, folder)
    assert (await start(api)).status_code == 200


async def test_an_upload_that_was_refused_gives_way_unless_it_is_sent_again(
    api, upload, folder, services, tmp_path
):
    wrong = write_folder(tmp_path / "wrong", AdapterSpec(rank=4), TINY_MODEL, BASE_MODEL)
    services.uploads._uploads._most_open = 1
    await send(api, upload, wrong)
    assert (await finish(api, upload)).status_code == 400
    await send(api, upload, folder, CONFIG_FILE)
    assert (await start(api)).status_code == 400
    assert (await finish(api, upload)).status_code == 400
    other = (await start(api)).raise_for_status().json()
    assert not left_of(services, upload).exists()
    asked = await api.put(other["urls"][WEIGHTS_FILE], headers={"Content-Range": f"bytes */{1 << 40}"})
    assert asked.status_code == 413  # told before anything is sent
    await uploaded(api, (await start(api)).raise_for_status().json(), folder)


async def test_the_reaper_deletes_uploads_that_were_not_finished_in_time(api, upload, folder, services):
    await send(api, upload, folder)
    interrupted = left_of(services, upload).with_name("interrupted")
    interrupted.mkdir()
    created = interrupted.stat().st_mtime
    lifetime = stored.LIFETIME_SECONDS + stored.OVERTIME_SECONDS
    await services.reaper.reap(created + lifetime - 10)
    assert left_of(services, upload).exists()
    await services.reaper.reap(created + lifetime + 10)
    assert not list((services.config.data_dir / stored.FOLDER).iterdir())


async def test_a_file_that_another_request_is_sending_must_wait(api, upload, folder, services):
    services.uploads._sending.add((upload["upload_id"], CONFIG_FILE))
    answer = await api.put(upload["urls"][CONFIG_FILE], content=b"{}")
    assert answer.status_code == 503


async def test_a_checkpoint_whose_making_was_interrupted_is_made_by_the_next_finish(
    api, upload, folder, services, monkeypatch
):
    await send(api, upload, folder)
    publish = services.checkpoints.complete

    async def no_disk(*_):
        raise OSError("no disk")

    monkeypatch.setattr(services.checkpoints, "complete", no_disk)
    assert (await finish(api, upload)).status_code >= 500
    assert (await api.get("checkpoints")).json()["checkpoints"] == []
    monkeypatch.setattr(services.checkpoints, "complete", publish)
    assert (await finish(api, upload)).status_code == 200
    assert len((await api.get("training_runs")).json()["training_runs"]) == 1


@pytest.mark.parametrize("by", ["finish", "reaper"])
async def test_an_upload_that_a_killed_server_did_not_forget_is_forgotten(
    api, upload, folder, services, monkeypatch, by
):
    forget = services.uploads._uploads.forget
    monkeypatch.setattr(services.uploads._uploads, "forget", lambda _: None)
    path = await uploaded(api, upload, folder)
    assert left_of(services, upload).exists()
    monkeypatch.setattr(services.uploads._uploads, "forget", forget)
    unfinished = (await start(api)).raise_for_status().json()
    if by == "finish":
        assert (await finish(api, upload)).json()["tinker_path"] == path
    else:
        await services.reaper.reap()
    assert not left_of(services, upload).exists()
    assert left_of(services, unfinished).exists()
    assert [each["tinker_path"] for each in (await api.get("checkpoints")).json()["checkpoints"]] == [path]


async def test_an_encrypted_checkpoint_is_not_loaded(api, upload, folder, session_id, services):
    path = await uploaded(api, upload, folder)
    address = path.removeprefix("tinker://").split("/")
    place = services.config.checkpoints_dir / address[0].replace(":", "_") / address[1] / address[2]
    os.rename(place / WEIGHTS_FILE, place / f"{WEIGHTS_FILE}.age")
    manifest = place / "checkpoint.json"
    manifest.write_text(manifest.read_text().replace(WEIGHTS_FILE, f"{WEIGHTS_FILE}.age"))
    body = {"session_id": session_id, "sampling_session_seq_id": 0, "model_path": path}
    answer = await api.post("create_sampling_session", json=body)
    assert "encrypted" in answer.json()["detail"]


async def test_weights_from_outside_have_no_optimizer_to_load(api, upload, folder, session_id):
    path = await uploaded(api, upload, folder)
    answer = await api.post("load_weights", json={**load(session_id, path), "optimizer": True})
    assert answer.status_code == 400
    assert "has no optimizer state" in answer.json()["detail"]


async def test_a_file_stops_where_the_disk_is_too_full_and_goes_on_later(api, upload, folder, services):
    url, content = upload["urls"][WEIGHTS_FILE], (folder / WEIGHTS_FILE).read_bytes()
    services.storage._is_full = True
    assert (await api.put(url, content=content)).status_code == 503
    services.storage._is_full = False
    assert (await api.put(url, content=content)).status_code == 200


async def test_a_server_that_trains_all_weights_takes_none(api, services, monkeypatch):
    base = services.bases.default
    bases = Bases([replace(base, limits=replace(base.limits, max_rank=0))])
    monkeypatch.setitem(vars(services), "bases", bases)
    for rank in (0, 8):
        answer = await start(api, lora_config={"rank": rank})
        assert answer.status_code == 400
        assert "uploads are LoRA adapters and this server trains all weights" in answer.json()["error"]
