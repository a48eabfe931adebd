import stat
from urllib.parse import parse_qsl, unquote, urlsplit

import pytest

from spmd_tx.coordinator.http.security.signed_urls import LIFETIME_SECONDS, SignedUrls, open_secret
from spmd_tx.coordinator.tenancy.callers import Caller
from spmd_tx.errors import Forbidden

PATH = "/api/v1/files/S:train:0/a file"


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


def parts(url: str) -> tuple[str, dict[str, str]]:
    """Path and query as a server sees them."""
    split = urlsplit(url)
    return unquote(split.path), dict(parse_qsl(split.query))


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def urls(clock) -> SignedUrls:
    return SignedUrls(b"secret" * 6, clock)


def test_whoever_has_the_url_may_read_as_its_owner(urls):
    url = urls.sign("http://server:80/", PATH, "alice@example.org", "k1")
    assert url.startswith("http://server:80/api/v1/files/S%3Atrain%3A0/a%20file?expires=")
    assert urls.caller(*parts(url)) == Caller("alice@example.org", "read-only", "k1")


def test_a_url_expires(urls, clock):
    url = parts(urls.sign("http://server", PATH, "alice", "k1"))
    clock.now += LIFETIME_SECONDS - 1
    assert urls.caller(*url).owner == "alice"
    clock.now += 1
    with pytest.raises(Forbidden, match="has expired"):
        urls.caller(*url)


@pytest.mark.parametrize(
    "change",
    [
        {"expires": "99999999"},
        {"expires": "nan"},
        {"owner": "mallory"},
        {"key": "k2"},
        {"key": ""},
        {"signature": "0" * 64},
        {"signature": "ö"},
        {"signature": ""},
        None,
    ],
    ids=str,
)
def test_a_url_that_was_changed_is_refused(urls, change):
    path, query = parts(urls.sign("http://server", PATH, "alice", "k1"))
    with pytest.raises(Forbidden, match="does not fit"):
        urls.caller(path, {} if change is None else query | change)
    with pytest.raises(Forbidden, match="does not fit"):
        urls.caller(path + "b", query)


def test_nothing_moves_from_one_signed_part_to_another(urls):
    _, query = parts(urls.sign("http://server", "/a", "b\nc", None))
    expires = query["expires"]
    with pytest.raises(Forbidden, match="does not fit"):
        urls.caller(f"/a\n{expires}", query | {"expires": "b", "owner": "c"})


def test_urls_outlive_the_server_and_the_secret_is_its_own(tmp_path):
    url = SignedUrls(open_secret(tmp_path)).sign("http://server", PATH, "alice", "k1")
    assert SignedUrls(open_secret(tmp_path)).caller(*parts(url)).owner == "alice"
    (secret,) = tmp_path.iterdir()
    assert stat.S_IMODE(secret.stat().st_mode) == 0o600
    (tmp_path / "other").mkdir()
    with pytest.raises(Forbidden):
        SignedUrls(open_secret(tmp_path / "other")).caller(*parts(url))
