import urllib.request

import pytest

from spmd_tx.processes.environments import past_proxies, proxies

PROXY = "http://proxy.example:3128"


@pytest.mark.parametrize("name", ["http_proxy", "HTTPS_PROXY", "ALL_PROXY", "all_proxy", "grpc_proxy"])
def test_no_proxy_is_asked_for_this_machine(name):
    added = past_proxies({name: PROXY})
    assert added["no_proxy"] == added["NO_PROXY"] == "localhost,127.0.0.1,::1"
    for host in ("127.0.0.1:8000", "localhost"):
        assert urllib.request.proxy_bypass_environment(host, {"no": added["no_proxy"]})


def test_hosts_that_are_excepted_already_stay_so():
    environment = {"http_proxy": PROXY, "no_proxy": "10.0.0.0/8, localhost", "NO_PROXY": ".example.com,"}
    assert past_proxies(environment)["no_proxy"] == "10.0.0.0/8,localhost,.example.com,127.0.0.1,::1"


def test_without_a_proxy_nothing_is_set():
    assert past_proxies({"no_proxy": "example.com", "PATH": "/bin"}) == {}
    assert proxies({"no_proxy": "a", "NO_PROXY": "b", "Http_Proxy": "c"}) == ["Http_Proxy"]
