import time

import httpx
import pytest

from spmd_tx.coordinator.http.security import console_cookie
from spmd_tx.coordinator.tenancy import keys
from spmd_tx.coordinator.tenancy.callers import Caller

SESSION = "http://server/console/api/session"
PAGE = {"X-Console": "1"}


@pytest.fixture
async def sign_in(api, client_for):
    """Sign the client ``api`` in with a new key: ``await sign_in("alice", role="read-only")``."""

    async def sign_in(owner: str, **wish: object) -> httpx.Response:
        key = (await client_for(owner, **wish)).headers["x-api-key"]
        return await api.post(SESSION, json={"api_key": key}, headers=PAGE)

    return sign_in


async def test_a_browser_signs_in_with_a_key_and_out(api, sign_in):
    answer = await sign_in("alice+1@home")
    alice = {"owner": "alice+1@home", "role": "user", "is_read_only": False, "needs_key": True}
    assert answer.json() == alice
    assert (await api.get(SESSION)).json() == alice
    assert (await api.get("sessions")).status_code == 200
    assert (await api.delete(SESSION, headers=PAGE)).status_code == 200
    assert (await api.get(SESSION)).status_code == 401


async def test_scripts_and_other_sites_do_not_get_the_cookie(sign_in):
    answer = await sign_in("alice")
    given = answer.headers["set-cookie"].lower()
    assert "httponly" in given
    assert "samesite=strict" in given
    assert "secure" not in given  # the browser would not send it to this address


async def test_the_cookie_stays_on_encrypted_connections(app, client_for):
    key = (await client_for("alice")).headers["x-api-key"]
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="https://server") as client:
        answer = await client.post("/console/api/session", json={"api_key": key}, headers=PAGE)
    assert "secure" in answer.headers["set-cookie"].lower()
    assert key not in answer.headers["set-cookie"]


async def test_a_change_needs_the_header_of_the_consoles_own_pages(api, sign_in):
    await sign_in("alice")
    body = {"tags": [], "sdk_version": "0.38.0"}
    refused = await api.post("create_session", json=body)
    assert refused.status_code == 403
    assert "X-Console: 1" in refused.json()["detail"]
    assert (await api.post("create_session", json=body, headers=PAGE)).status_code == 200


@pytest.mark.parametrize("method", ["POST", "DELETE"])
async def test_other_sites_sign_nobody_in_or_out(api, method):
    assert (await api.request(method, SESSION, json={"api_key": "tml-a"})).status_code == 403
    headers = PAGE | {"origin": "https://elsewhere.example"}
    assert (await api.request(method, SESSION, json={"api_key": "tml-a"}, headers=headers)).status_code == 403


async def test_a_read_only_key_changes_nothing(api, sign_in):
    assert (await sign_in("alice", role="read-only")).json()["is_read_only"]
    refused = await api.post("create_session", json={"tags": [], "sdk_version": "0.38.0"}, headers=PAGE)
    assert refused.status_code == 403
    assert "may only read" in refused.json()["detail"]


async def test_a_revoked_key_is_out_when_the_keys_are_read_again(api, sign_in, services):
    await sign_in("alice")
    (key_id,) = services.keyring._by_id
    async with services.database.transaction() as db:
        await keys.revoke(db, key_id)
    await services.keyring.look()
    refused = await api.get(SESSION)
    assert refused.status_code == 401
    assert "was revoked" in refused.json()["detail"]


async def test_an_unknown_key_is_refused(api, client_for):
    await client_for("alice")
    answer = await api.post(SESSION, json={"api_key": "tml-unknown"}, headers=PAGE)
    assert answer.status_code == 401
    assert "set-cookie" not in answer.headers


async def test_a_long_body_is_refused_before_its_key_is_known(api):
    answer = await api.post(SESSION, json={"api_key": "a" * 100_000}, headers=PAGE)
    assert answer.status_code == 413


@pytest.mark.parametrize("value", ["", "a", "nonsense", "é".encode().hex(), "b3duZXI9YWxpY2U="])
async def test_a_made_up_cookie_is_refused(api, client_for, value):
    await client_for("alice")
    refused = await api.get(SESSION, headers={"cookie": f"{console_cookie.NAME}={value}"})
    assert refused.status_code == 401
    assert "not valid or has expired" in refused.json()["detail"]


async def test_a_cookie_expires_and_cannot_be_changed(client_for, services, monkeypatch):
    await client_for("alice")
    (key_id,) = services.keyring._by_id
    value = console_cookie.seal(services.signed_urls, Caller("alice", "user", key_id))
    assert console_cookie.caller(value, services.signed_urls, services.keyring).owner == "alice"
    with pytest.raises(Exception, match="not valid or has expired"):
        console_cookie.caller(value[:-8] + "AAAAAAA=", services.signed_urls, services.keyring)
    later = time.time() + console_cookie.LIFETIME_SECONDS + 1
    monkeypatch.setattr(services.signed_urls, "_clock", lambda: later)
    with pytest.raises(Exception, match="not valid or has expired"):
        console_cookie.caller(value, services.signed_urls, services.keyring)


async def test_a_server_without_keys_opens_at_once(api):
    everyone = {"owner": "local", "role": "admin", "is_read_only": False, "needs_key": False}
    assert (await api.get("http://localhost/console/api/session")).json() == everyone
    answer = await api.post("http://localhost/console/api/session", json={"api_key": "tml-any"}, headers=PAGE)
    assert answer.json() == everyone
    assert "set-cookie" not in answer.headers
