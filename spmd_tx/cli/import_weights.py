"""``spmd-tx import`` uploads an adapter in a PEFT folder to a server that runs."""

import json
import urllib.error
import urllib.request
from pathlib import Path
from typing import Annotated, Any

import typer

from spmd_tx.errors import StartError

TIMEOUT_SECONDS = 600.0


def import_weights(
    directory: Annotated[
        Path, typer.Argument(help="Folder with adapter_config.json and adapter_model.safetensors.")
    ],
    url: Annotated[
        str, typer.Option(envvar="TINKER_BASE_URL", help="Address of the server.")
    ] = "http://127.0.0.1:8000",
    api_key: Annotated[
        str, typer.Option(envvar="TINKER_API_KEY", help="API key; the checkpoint belongs to its owner.")
    ] = "",
    project: Annotated[str | None, typer.Option(help="Project of the training run that is made.")] = None,
) -> None:
    """Upload a LoRA adapter to a running server, and print its tinker:// path.

    Takes folders of PEFT and those that hosted Tinker exports. The checkpoint
    can be loaded to train on, without an optimizer state, and sampled.
    """
    typer.echo(Server(url, api_key).upload(directory, project))


class Server:
    """Sends requests to one server."""

    def __init__(self, url: str, api_key: str) -> None:
        self._url = url.rstrip("/")
        self._headers = {"X-Api-Key": api_key} if api_key else {}

    def upload(self, directory: Path, project: str | None = None) -> str:
        """Return the path of the new checkpoint. Raises StartError."""
        served = self._ask("get_server_capabilities")["supported_models"][0]["model_name"]
        body = {
            "base_model": served,
            "lora_config": lora_config(directory),
            "destination_project_id": project,
        }
        upload = self._ask("external_weights_upload_start", body)
        for name, address in upload["urls"].items():
            size = (directory / name).stat().st_size
            with (directory / name).open("rb") as file:
                self._send(
                    urllib.request.Request(
                        address, data=file, headers={"Content-Length": str(size)}, method="PUT"
                    )
                )
        return self._ask("external_weights_upload_finish", {"upload_id": upload["upload_id"]})["tinker_path"]

    def _ask(self, route: str, body: object = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        headers = self._headers | {"Content-Type": "application/json"}
        return json.loads(
            self._send(urllib.request.Request(f"{self._url}/api/v1/{route}", data=data, headers=headers))
        )

    def _send(self, request: urllib.request.Request) -> bytes:
        try:
            with urllib.request.urlopen(request, timeout=TIMEOUT_SECONDS) as answer:
                return answer.read()
        except urllib.error.HTTPError as error:
            raise StartError(f"{self._url} refuses this: {_detail(error.read())}") from None
        except urllib.error.URLError as error:
            raise StartError(
                f"cannot reach {self._url}: {error.reason}; name the server with --url or TINKER_BASE_URL"
            ) from None


def lora_config(directory: Path) -> dict[str, object]:
    """Read what an upload announces: the rank, and what is trained. Raises StartError."""
    from spmd_tx.models.adapter_files import CONFIG_FILE, TENSOR, WEIGHTS_FILE, group_of_module

    try:
        rank = json.loads((directory / CONFIG_FILE).read_bytes())["r"]
        with (directory / WEIGHTS_FILE).open("rb") as file:
            names = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    except OSError as error:
        raise StartError(f"{directory} is no PEFT folder: cannot read {error.filename}") from None
    except (ValueError, KeyError, MemoryError, OverflowError) as error:
        raise StartError(f"{directory} is no PEFT folder, or is damaged: {error!r}") from None
    modules = [found["module"] for name in names if (found := TENSOR.fullmatch(name)) is not None]
    groups = {group_of_module(module) for module in modules}
    return {
        "rank": rank,
        "train_attn": "attn" in groups,
        "train_mlp": "mlp" in groups,
        "train_unembed": "unembed" in groups,
    }


def _detail(body: bytes) -> str:
    try:
        answer = json.loads(body)
        return answer.get("detail") or answer.get("error") or str(answer)
    except (ValueError, AttributeError):
        return body[:500].decode(errors="replace")
