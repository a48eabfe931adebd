import json
import socket
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from spmd_tx.cli.server import Server, Unreachable, is_this_machine
from spmd_tx.errors import StartError

VARIABLES = ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY")
NO_ONE = "http://127.0.0.1:9"  # the port of the discard protocol, where nothing listens


class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        body = json.dumps(self.path).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


@pytest.fixture(params=["127.0.0.1", "::1"])
def url(request):
    class Listening(ThreadingHTTPServer):
        address_family = socket.AF_INET6 if ":" in request.param else socket.AF_INET

    try:
        server = Listening((request.param, 0), Handler)
    except OSError as error:
        pytest.skip(f"this machine has no {request.param}: {error}")
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    host = f"[{request.param}]" if ":" in request.param else request.param
    yield f"http://{host}:{server.server_port}"
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize("name", VARIABLES)
def test_a_server_on_this_machine_is_asked_without_a_proxy(url, monkeypatch, name):
    for each in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(each, raising=False)
    monkeypatch.setenv(name, NO_ONE)
    assert Server(url, "").ask("/here") == "/here"


def test_a_server_elsewhere_is_asked_through_the_proxy(monkeypatch):
    monkeypatch.setenv("http_proxy", NO_ONE)
    with pytest.raises(Unreachable, match="refused"):  # by the proxy: the name cannot be looked up
        Server("http://nobody.invalid", "").ask("/there")


@pytest.mark.parametrize(
    "host", ["0.0.0.0", "::", "127.1.2.3", "localhost", "LocalHost", socket.gethostname()]
)
def test_this_machine_is_known_by_its_names(host):
    assert is_this_machine(host)


@pytest.mark.parametrize("host", ["10.0.0.1", "example.com", "localhost.example.com", ""])
def test_other_machines_are_not_this_one(host):
    assert not is_this_machine(host)


def test_a_port_out_of_range_is_no_address():
    with pytest.raises(StartError, match=r"http://127.0.0.1:99999', which is no address: Port out of range"):
        Server("http://127.0.0.1:99999", "")
