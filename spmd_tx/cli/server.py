"""Sends requests to a server that runs, for commands that are its clients."""

import json
import urllib.error
import urllib.request
from typing import Annotated, Any

import typer

from spmd_tx.errors import StartError

TIMEOUT_SECONDS = 600.0
LOCAL = "http://127.0.0.1:8000"

Url = Annotated[str, typer.Option(envvar="TINKER_BASE_URL", help="Address of the server.")]
ApiKey = Annotated[str, typer.Option(envvar="TINKER_API_KEY", help="API key, if the server has any.")]


class Server:
    """Sends requests to one server."""

    def __init__(self, url: str, api_key: str) -> None:
        self._url = url.rstrip("/")
        self._headers = {"X-Api-Key": api_key} if api_key else {}

    def ask(self, route: str, body: object = None) -> Any:
        """Return the answer to a GET of a route, or to a POST of the body. Raises StartError.

        Routes without a slash at their beginning are those of the Tinker API.
        """
        data = None if body is None else json.dumps(body).encode()
        headers = self._headers | {"Content-Type": "application/json"}
        address = self._url + (route if route.startswith("/") else f"/api/v1/{route}")
        return json.loads(self.send(urllib.request.Request(address, data=data, headers=headers)))

    def send(self, request: urllib.request.Request) -> bytes:
        """Return the body of an answer. Raises StartError."""
        try:
            with urllib.request.urlopen(request, timeout=TIMEOUT_SECONDS) as answer:
                return answer.read()
        except urllib.error.HTTPError as error:
            raise StartError(f"{self._url} refuses this: {_detail(error.read())}") from None
        except urllib.error.URLError as error:
            raise StartError(
                f"cannot reach {self._url}: {error.reason}; name the server with --url or TINKER_BASE_URL"
            ) from None


def _detail(body: bytes) -> str:
    try:
        answer = json.loads(body)
        return answer.get("detail") or answer.get("error") or str(answer)
    except (ValueError, AttributeError):
        return body[:500].decode(errors="replace")
