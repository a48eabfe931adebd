import io
import tarfile
import time

import httpx
import msgspec
import pytest

from spmd_tx.coordinator.http.security import signed_urls
from spmd_tx.coordinator.wire.checkpoint_paths import parse
from spmd_tx.errors import StartError
from tests.coordinator.http.tinker.test_checkpoints import result, save

pytestmark = pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
CONTENT = b"weights"  # of the one file that FakeScheduler writes
FILE = "shards/0.bin"


async def export(api, model_id, name="out", seq_id=5, **options):
    body = {"model_id": model_id, "path": name, "seq_id": seq_id, **options}
    return (await result(api, "save_weights_external", body))["path"]


async def urls_of(api, path, **headers):
    run_id, kind, name = parse(path)
    address = f"training_runs/{run_id}/checkpoints/{kind}/{name}/external_weights_urls"
    return (await api.get(address, headers=headers)).raise_for_status().json()["urls"]


@pytest.fixture
async def url(api, model_id):
    return (await urls_of(api, await export(api, model_id)))[FILE]


@pytest.fixture
async def anybody(app):
    """Without a key."""
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app)) as client:
        yield client


async def test_an_export_is_downloaded_by_its_links_alone(api, anybody, model_id, client_for):
    owner = await client_for("local")
    path = await export(owner, model_id)
    links = await urls_of(owner, path)
    assert list(links) == [FILE]
    answer = await anybody.get(links[FILE])
    assert (answer.status_code, answer.content) == (200, CONTENT)
    assert answer.headers["content-length"] == "7"
    assert answer.headers["content-disposition"] == "attachment; filename*=UTF-8''0.bin"


@pytest.mark.parametrize(
    "wanted, content, of",
    [
        ("bytes=0-2", b"wei", "0-2/7"),
        ("bytes=3-", b"ghts", "3-6/7"),
        ("bytes=-2", b"ts", "5-6/7"),
        ("bytes=-100", CONTENT, "0-6/7"),
        ("bytes=6-100", b"s", "6-6/7"),
    ],
)
async def test_a_part_is_sent_to_who_asks_for_it(anybody, url, wanted, content, of):
    answer = await anybody.get(url, headers={"range": wanted})
    assert (answer.status_code, answer.content) == (206, content)
    assert answer.headers["content-range"] == f"bytes {of}"
    assert answer.headers["content-length"] == str(len(content))


@pytest.mark.parametrize("wanted", ["bytes=7-", "bytes=-0", "bytes=9-12"])
async def test_a_part_that_is_not_there_is_refused_with_the_size(anybody, url, wanted):
    answer = await anybody.get(url, headers={"range": wanted})
    assert (answer.status_code, answer.headers["content-range"]) == (416, "bytes */7")
    assert "0.bin has 7" in answer.json()["detail"]


@pytest.mark.parametrize("wanted", ["bytes=3-1", "bytes=0-1,3-4", "bytes=-", "lines=1-2", "bytes=a-b"])
async def test_what_is_no_single_range_is_answered_with_all(anybody, url, wanted):
    answer = await anybody.get(url, headers={"range": wanted})
    assert (answer.status_code, answer.content) == (200, CONTENT)


async def test_a_download_is_resumed_only_if_the_file_is_the_same(anybody, url):
    etag = (await anybody.head(url)).headers["etag"]
    rest = await anybody.get(url, headers={"range": "bytes=3-", "if-range": etag})
    assert (rest.status_code, rest.content) == (206, b"ghts")
    other = await anybody.get(url, headers={"range": "bytes=3-", "if-range": '"another"'})
    assert (other.status_code, other.content) == (200, CONTENT)
    known = await anybody.get(url, headers={"if-none-match": f'"x", {etag}'})
    assert (known.status_code, known.content) == (304, b"")


async def test_head_tells_the_size_and_sends_nothing(anybody, url):
    answer = await anybody.head(url)
    assert (answer.status_code, answer.content) == (200, b"")
    assert (answer.headers["content-length"], answer.headers["accept-ranges"]) == ("7", "bytes")


ALTERED = [
    ("signature=", "signature=0"),
    ("expires=", "expires=9"),
    ("/out/", "/other/"),
    ("/shards/0.bin", "/shards/1.bin"),
    ("/shards/0.bin", "/checkpoint.json"),
    ("/shards/0.bin", "/../../weights/ck1/shards/0.bin"),
    ("owner=local", "owner=root"),
    ("external_weights", "weights"),
    ("external_weights", "nothing"),
    ("&signature", "&unsigned"),
]


async def test_an_altered_link_opens_nothing_and_tells_nothing(api, anybody, model_id, url):
    await save(api, model_id, "out")  # of the same name
    await export(api, model_id, "other", seq_id=6)
    for before, after in ALTERED:
        answer = await anybody.get(url.replace(before, after, 1))
        assert answer.status_code == 403, (before, after)
        assert "the signature does not fit" in answer.json()["detail"]


async def test_a_link_ends_after_an_hour(anybody, url, services, monkeypatch):
    later = time.time() + signed_urls.LIFETIME_SECONDS + 1
    monkeypatch.setattr(services.signed_urls, "_clock", lambda: later)
    answer = await anybody.get(url)
    assert answer.status_code == 403
    assert "has expired" in answer.json()["detail"]


async def test_a_link_ends_with_its_checkpoint(api, anybody, model_id, url):
    path = f"training_runs/{model_id}/checkpoints/external_weights/out"
    (await api.delete(path)).raise_for_status()
    assert (await anybody.get(url)).status_code == 404
    await export(api, model_id, seq_id=7)  # again under that name
    answer = await anybody.get(url)
    assert answer.status_code == 404
    assert "was overwritten since" in answer.json()["detail"]


async def test_links_lead_where_the_client_has_come_from(api, model_id):
    path = await export(api, model_id)
    proxied = {
        "x-forwarded-proto": "https",
        "x-forwarded-host": "tinker.example.org, inner",
        "x-forwarded-prefix": "/lab/",
    }
    forged = {"x-forwarded-host": "evil.example/path?", "x-forwarded-prefix": "//x y"}
    for headers, start in [
        ({}, "http://server/api/v1/downloads/files/"),
        ({"host": "10.0.0.7:8000"}, "http://10.0.0.7:8000/api/v1/"),
        (proxied, "https://tinker.example.org/lab/api/v1/downloads/"),
        (forged, "http://server/api/v1/"),
    ]:
        assert (await urls_of(api, path, **headers))[FILE].startswith(start)


async def test_nobody_but_a_trusted_proxy_says_where_the_client_has_come_from(api, services, model_id):
    path = await export(api, model_id)
    forwarded = {"x-forwarded-host": "tinker.example.org"}
    for proxies, host in [("10.0.0.0/8,::1", "server"), ("10.1.1.1, 127.0.0.0/8", "tinker.example.org")]:
        services.config = msgspec.structs.replace(services.config, trusted_proxies=proxies)
        assert (await urls_of(api, path, **forwarded))[FILE].startswith(f"http://{host}/api/v1/")


async def test_only_exports_have_links_to_files(api, model_id):
    await save(api, model_id)
    answer = await api.get(f"training_runs/{model_id}/checkpoints/weights/ck1/external_weights_urls")
    assert answer.status_code == 400
    assert "save_weights_external" in answer.json()["detail"]


async def test_any_checkpoint_is_downloaded_as_an_archive(api, anybody, model_id):
    await save(api, model_id)
    address = f"training_runs/{model_id}/checkpoints/weights/ck1/archive"
    answer = await api.get(address, follow_redirects=False)
    assert (answer.status_code, answer.content) == (302, b"")
    assert answer.headers["expires"].endswith("GMT")
    archive = await anybody.get(answer.headers["location"])
    assert archive.headers["content-length"] == str(len(archive.content))
    with tarfile.open(fileobj=io.BytesIO(archive.content)) as opened:
        assert opened.getnames() == [FILE, "checkpoint_complete"]
        assert opened.extractfile(FILE).read() == CONTENT
    for start, end in [(0, 1), (510, 514), (516, 2000), (2047, 2049)]:
        part = await anybody.get(answer.headers["location"], headers={"range": f"bytes={start}-{end - 1}"})
        assert part.content == archive.content[start:end]


async def test_a_published_export_can_be_downloaded_by_others(client_for, api, model_id):
    path = await export(api, model_id)
    owner, other = await client_for("local"), await client_for("other")
    address = f"training_runs/{model_id}/checkpoints/external_weights/out"
    assert (await other.get(f"{address}/external_weights_urls")).status_code == 404
    (await owner.post(f"{address}/publish")).raise_for_status()
    link = (await urls_of(other, path))[FILE]
    assert (await other.get(link)).content == CONTENT
    (await owner.delete(f"{address}/publish")).raise_for_status()
    assert (await other.get(link)).status_code == 404
    root = await client_for("root", role="admin")
    assert (await root.get((await urls_of(root, path))[FILE])).content == CONTENT


def test_a_secret_that_was_cut_short_is_not_used(database_url, tmp_path):
    (tmp_path / signed_urls.SECRET_FILE).write_bytes(b"short")
    with pytest.raises(StartError, match="has 5 bytes instead of 32; delete it"):
        signed_urls.open_secret(tmp_path)
