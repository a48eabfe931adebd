import socket

import pytest
from litestar.datastructures import Headers

from spmd_tx.config import ServerConfig
from spmd_tx.coordinator.http.security.cross_site import keep_out
from spmd_tx.errors import Forbidden, UnsupportedBody

LOOPBACK = ServerConfig(base_model="m")
NETWORK = ServerConfig(base_model="m", host="0.0.0.0", insecure_no_auth=True)
NAMED = ServerConfig(base_model="m", host="gpu-host", insecure_no_auth=True)


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST:8000", "127.0.0.1:8000", "127.1.2.3", "[::1]:8000"])
@pytest.mark.parametrize("config", [LOOPBACK, NETWORK, NAMED], ids=["loopback", "network", "named"])
def test_a_server_answers_to_names_of_its_own_host(host, config):
    keep_out(Headers({"host": host}), config)


@pytest.mark.parametrize(
    "config, host",
    [
        (NETWORK, "10.0.0.7:8000"),
        (NETWORK, "[fd00::7]:8000"),
        (NETWORK, socket.gethostname()),
        (NAMED, "gpu-host:8000"),
        (NAMED, "10.0.0.7"),
    ],
)
def test_one_that_serves_a_network_answers_to_addresses_and_to_the_name_that_it_was_given(config, host):
    keep_out(Headers({"host": host}), config)


@pytest.mark.parametrize(
    "config, host",
    [
        (LOOPBACK, "attacker.example"),
        (LOOPBACK, "localhost.attacker.example"),
        (LOOPBACK, "127.0.0.1.attacker.example:8000"),
        (LOOPBACK, "10.0.0.7:8000"),
        (LOOPBACK, ""),
        (NETWORK, "attacker.example"),
        (NAMED, "attacker.example:8000"),
    ],
)
def test_it_does_not_answer_to_names_that_a_web_page_can_have(config, host):
    with pytest.raises(Forbidden, match=r"use localhost or an address.*or create a key"):
        keep_out(Headers({"host": host}), config)


@pytest.mark.parametrize("origin", ["https://attacker.example", "null", "http://10.0.0.7", "file://"])
def test_it_takes_nothing_from_pages_of_others(origin):
    with pytest.raises(Forbidden, match="no requests from pages"):
        keep_out(Headers({"host": "localhost", "origin": origin}), LOOPBACK)


def test_it_takes_requests_from_pages_of_its_own_host():
    keep_out(Headers({"host": "localhost:8000", "origin": "http://localhost:8888"}), LOOPBACK)


@pytest.mark.parametrize(
    "kind",
    [
        "text/plain",
        "TEXT/PLAIN; charset=utf-8",
        "multipart/form-data; boundary=x",
        "application/x-www-form-urlencoded",
    ],
)
def test_it_takes_nothing_that_forms_send(kind):
    with pytest.raises(UnsupportedBody, match="send application/json"):
        keep_out(Headers({"host": "localhost", "content-type": kind}), LOOPBACK)


@pytest.mark.parametrize(
    "kind", ["application/json", "application/json; charset=utf-8", "application/x-protobuf"]
)
def test_it_takes_what_clients_send(kind):
    keep_out(Headers({"host": "localhost", "content-type": kind, "content-length": "2"}), LOOPBACK)


def test_a_body_of_no_kind_is_taken_from_programs_only():
    about = {"host": "localhost", "content-length": "2"}
    keep_out(Headers(about), LOOPBACK)
    with pytest.raises(UnsupportedBody):
        keep_out(Headers(about | {"origin": "http://localhost"}), LOOPBACK)


REBOUND = {"host": "attacker.example"}
ACROSS_SITES = {"origin": "https://attacker.example"}
FORM = {"content-type": "text/plain"}


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
@pytest.mark.parametrize("headers, status", [(REBOUND, 403), (ACROSS_SITES, 403), (FORM, 415)], ids=str)
async def test_web_pages_are_kept_out_until_there_are_keys(api, client_for, headers, status):
    for method, path in (("GET", "sessions"), ("POST", "create_session")):
        if headers is not FORM or method == "POST":
            answer = await api.request(method, path, content="{}", headers=headers)
            assert answer.status_code == status, answer.text
    assert (await api.get("healthz", headers=headers)).status_code == 200
    alice = await client_for("alice")
    assert (await alice.get("sessions", headers=headers)).status_code == 200
    assert (await api.get("sessions", headers=headers)).status_code == 401
