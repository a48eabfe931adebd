"""``spmd-tx import`` uploads an adapter in a PEFT folder to a server that runs."""

import json
from pathlib import Path
from typing import Annotated

import typer

from spmd_tx.cli.server import LOCAL, ApiKeyOption, Server, UrlOption
from spmd_tx.errors import StartError


def import_weights(
    directory: Annotated[
        Path,
        typer.Argument(
            metavar="DIRECTORY", help="Folder with adapter_config.json and adapter_model.safetensors."
        ),
    ],
    url: UrlOption = LOCAL,
    api_key: ApiKeyOption = "",
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
    announced = lora_config(directory) | ({} if rank is None else {"rank": rank})
    body = {
        "base_model": _served(server),
        "lora_config": announced,
        "destination_project_id": project,
    }
    upload = server.ask("external_weights_upload_start", body)
    for name, address in upload["urls"].items():
        size = (directory / name).stat().st_size
        # A file that is too large is refused before it is sent.
        server.send(address, {"Content-Range": f"bytes */{size}"}, method="PUT")
        with (directory / name).open("rb") as file:
            server.send(address, {"Content-Length": str(size)}, file, "PUT")
    return server.ask("external_weights_upload_finish", {"upload_id": upload["upload_id"]})["tinker_path"]


def _served(server: Server) -> str:
    try:
        return server.ask("get_server_capabilities")["supported_models"][0]["model_name"]
    except (LookupError, TypeError):
        raise StartError("the server at --url names no base model; is it the address of spmd_tx?") from None


def lora_config(directory: Path) -> dict[str, object]:
    """Read what an upload announces: the rank, and what is trained. Raises StartError."""
    from spmd_tx.models.adapter_formats.files import CONFIG_FILE, WEIGHTS_FILE, groups_of

    try:
        rank = json.loads((directory / CONFIG_FILE).read_bytes())["r"]
        with (directory / WEIGHTS_FILE).open("rb") as file:
            size, content = int.from_bytes(file.read(8), "little"), (directory / WEIGHTS_FILE).stat().st_size
            if size > content - 8:
                raise StartError(
                    f"{directory / WEIGHTS_FILE} is damaged, or no safetensors file: its header has {size} "
                    f"bytes, and the whole file has {content}; save the adapter again"
                )
            names = list(map(str, json.loads(file.read(size))))
    except OSError as error:
        raise StartError(f"{directory} is not a PEFT folder: cannot read {error.filename}") from None
    except (ValueError, LookupError, TypeError, RecursionError) as error:
        raise StartError(f"{directory} is not a PEFT folder, or is damaged: {error!r}") from None
    if type(rank) is not int:
        raise StartError(f"r of {directory / CONFIG_FILE} is {rank!r}; it must be a whole number")
    groups = groups_of(names)
    if not groups:
        raise StartError(f"{directory / WEIGHTS_FILE} has no factors of an adapter (NAME.lora_A.weight)")
    return {
        "rank": rank,
        "train_attn": "attn" in groups,
        "train_mlp": "mlp" in groups,
        "train_unembed": "unembed" in groups,
    }
