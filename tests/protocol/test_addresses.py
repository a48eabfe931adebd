import pytest

from spmd_tx.protocol.addresses import is_loopback, joined, split


@pytest.mark.parametrize(
    "host, port", [("node-a", 8470), ("10.0.0.1", 1), ("::1", 65535), ("fe80::1%eth0", 8470), ("a.b.c", 80)]
)
def test_what_is_joined_can_be_split(host, port):
    assert split(joined(host, port)) == (host, port)


def test_an_ipv6_address_stands_in_brackets():
    assert joined("fd00::1", "*") == "[fd00::1]:*"


@pytest.mark.parametrize(
    "address, complaint",
    [
        *(
            (text, "must be HOST:PORT")
            for text in ("node-a", ":80", "a:", "::1:80", "[::1]", "a b:80", "[a]:80", "tcp://a:80")
        ),
        *((text, "from 1 to 65535") for text in ("node-a:0", "node-a:65536", "[::1]:99999")),
    ],
)
def test_what_is_no_address_is_refused(address, complaint):
    with pytest.raises(ValueError, match=complaint):
        split(address)


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.1.1", "::1", "localhost", "LOCALHOST.", "a.localhost"])
def test_loopback_is_known_by_address_and_name(host):
    assert is_loopback(host)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.1", "node-a", "localhost.example.com"])
def test_others_are_not_loopback(host):
    assert not is_loopback(host)
