"""``spmd-tx import`` uploads an adapter in a PEFT folder to a server that runs."""

import json
import urllib.request
from pathlib import Path
from typing import Annotated

import typer

from spmd_tx.cli.server import LOCAL, ApiKey, Server, Url
from spmd_tx.errors import StartError


def import_weights(
    directory: Annotated[
        Path,
        typer.Argument(
            metavar="DIRECTORY", help="Folder with adapter_config.json and adapter_model.safetensors."
        ),
    ],
    url: Url = LOCAL,
    api_key: ApiKey = "",
    project: Annotated[str | None, typer.Option(help="Project of the new training run.")] = None,
    rank: Annotated[
        int | None,
        typer.Option(min=1, help="Rank of the adapter, if some modules have a higher rank than its r."),
    ] = None,
) -> None:
    """Upload a LoRA adapter to a running server, and print its tinker:// path.

    Takes folders of PEFT and those that hosted Tinker exports. The checkpoint
    can be loaded to train on, without an optimizer state, and sampled.
    """
    typer.echo(upload(Server(url, api_key), directory, project, rank))


def upload(server: Server, directory: Path, project: str | None = None, rank: int | None = None) -> str:
    """Return the path of the new checkpoint. Raises StartError."""
    served = server.ask("get_server_capabilities")["supported_models"][0]["model_name"]
    body = {
        "base_model": served,
        "lora_config": lora_config(directory) | ({} if rank is None else {"rank": rank}),
        "destination_project_id": project,
    }
    upload = server.ask("external_weights_upload_start", body)
    for name, address in upload["urls"].items():
        size = (directory / name).stat().st_size
        with (directory / name).open("rb") as file:
            server.send(
                urllib.request.Request(
                    address, data=file, headers={"Content-Length": str(size)}, method="PUT"
                )
            )
    return server.ask("external_weights_upload_finish", {"upload_id": upload["upload_id"]})["tinker_path"]


def lora_config(directory: Path) -> dict[str, object]:
    """Read what an upload announces: the rank, and what is trained. Raises StartError."""
    from spmd_tx.models.adapter_formats.files import CONFIG_FILE, TENSOR, WEIGHTS_FILE, group_of_module

    try:
        rank = json.loads((directory / CONFIG_FILE).read_bytes())["r"]
        with (directory / WEIGHTS_FILE).open("rb") as file:
            names = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    except OSError as error:
        raise StartError(f"{directory} is not a PEFT folder: cannot read {error.filename}") from None
    except (ValueError, KeyError, MemoryError, OverflowError) as error:
        raise StartError(f"{directory} is not a PEFT folder, or is damaged: {error!r}") from None
    modules = [found["module"] for name in names if (found := TENSOR.fullmatch(name)) is not None]
    groups = {group_of_module(module) for module in modules}
    return {
        "rank": rank,
        "train_attn": "attn" in groups,
        "train_mlp": "mlp" in groups,
        "train_unembed": "unembed" in groups,
    }
