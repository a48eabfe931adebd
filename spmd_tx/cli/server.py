"""Sends requests to a server that runs, for commands that are its clients."""

import http.client
import json
import socket
import urllib.error
import urllib.request
from typing import Annotated, Any
from urllib.parse import urlsplit

import typer

from spmd_tx.errors import StartError
from spmd_tx.protocol import addresses

TIMEOUT_SECONDS = 600.0
LOCAL = "http://127.0.0.1:8000"
INCOMPLETE = 308  # a file that is uploaded has not arrived in full
AGAIN = (429, 502, 503, 504)  # the SDK, too, asks again after these

UrlOption = Annotated[str, typer.Option(envvar="TINKER_BASE_URL", help="Address of the server.")]
ApiKeyOption = Annotated[str, typer.Option(envvar="TINKER_API_KEY", help="API key, if the server has any.")]


class Unreachable(StartError):
    """No server answers at the address, or it does not answer in full."""


class Server:
    """Sends requests to one server."""

    def __init__(self, url: str, api_key: str) -> None:
        self._url = url.rstrip("/")
        if not self._url.startswith(("http://", "https://")):
            raise StartError(f"--url is {url!r}; an address begins with http:// or https://, as {LOCAL}")
        if not api_key.isascii() or not api_key.isprintable():
            raise StartError("the API key has characters that no key has; see --api-key and TINKER_API_KEY")
        try:
            parts = urlsplit(self._url)
            host, _ = parts.hostname or "", parts.port  # else 99999 would be asked for as port 34463
        except ValueError as problem:
            raise StartError(f"--url is {url!r}, which is no address: {problem}") from None
        # A proxy has another idea of what this machine is.
        handlers = [urllib.request.ProxyHandler({})] if is_this_machine(host) else []
        self._opener = urllib.request.build_opener(*handlers)
        self._headers = {"X-Api-Key": api_key} if api_key else {}

    def ask(self, route: str, body: object = None, method: str | None = None) -> Any:
        """Return the answer to a GET of a route, or to a POST of the body. Raises StartError.

        Routes without a slash at their beginning are those of the Tinker API. ``method`` may be another one.
        """
        data = None if body is None else json.dumps(body).encode()
        headers = self._headers | {"Content-Type": "application/json"}
        address = self._url + (route if route.startswith("/") else f"/api/v1/{route}")
        answer = self.send(address, headers, data, method)
        try:
            return json.loads(answer)
        except ValueError:
            raise StartError(
                f"{self._url} does not answer with JSON; is it the address of spmd_tx?"
            ) from None

    def send(
        self, address: str, headers: dict[str, str], data: Any = None, method: str | None = None
    ) -> bytes:
        """Return the body of an answer. Raises StartError, and Unreachable where asking again may help."""
        request = urllib.request.Request(address, data, headers, method=method)
        try:
            with self._opener.open(request, timeout=TIMEOUT_SECONDS) as answer:
                return answer.read()
        except urllib.error.HTTPError as error:
            if error.code == INCOMPLETE and "Location" not in error.headers:
                return b""
            kind = Unreachable if error.code in AGAIN else StartError
            raise kind(f"{self._url} refuses this: {_detail(error.read())}") from None
        except http.client.InvalidURL:
            raise StartError(f"--url is {self._url!r}, which no address is") from None
        except (OSError, http.client.HTTPException) as error:
            reason = getattr(error, "reason", error)
            raise Unreachable(
                f"cannot reach {self._url}: {reason}; name the server with --url or TINKER_BASE_URL"
            ) from None


def is_this_machine(host: str) -> bool:
    """Whether a host in an address is the machine that this process runs on. Asks no name server."""
    return addresses.is_loopback(host) or host.lower() in ("0.0.0.0", "::", socket.gethostname().lower())


def _detail(body: bytes) -> str:
    try:
        answer = json.loads(body)
        return answer.get("detail") or answer.get("error") or str(answer)
    except (ValueError, AttributeError):
        return body[:500].decode(errors="replace")
