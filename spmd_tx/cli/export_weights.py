"""``spmd-tx export`` writes what was trained for other servers and libraries, without a running server."""

import time
from typing import Annotated, Literal

import typer

from spmd_tx.byte_sizes import show_size
from spmd_tx.cli.export_sources import tell
from spmd_tx.cli.options import DEFAULTS, DataDir, environment_variable
from spmd_tx.errors import StartError

NEWS_SECONDS = 2.0  # between two lines of progress


def export_weights(
    adapter: Annotated[
        str,
        typer.Argument(
            metavar="ADAPTER",
            help="Folder, or tinker:// path of a checkpoint in --data-dir; the run's ID may be cut short.",
        ),
    ],
    out: Annotated[
        str | None,
        typer.Option(help="Folder to write, which must not exist, or a URL such as s3://bucket/path."),
    ] = None,
    push_to_hub: Annotated[
        str | None,
        typer.Option(metavar="OWNER/NAME", help="Repository of the Hugging Face Hub to push to."),
    ] = None,
    private: Annotated[bool, typer.Option("--private", help="Make a new repository private.")] = False,
    form: Annotated[
        Literal["merged", "peft", "tinker"],
        typer.Option(
            "--format",
            help="merged: a complete model. peft: an adapter for PEFT with transformers 5. "
            "tinker: an adapter as hosted Tinker has it.",
        ),
    ] = "merged",
    base_model: Annotated[
        str | None,
        typer.Option(help="Hugging Face ID or directory. Default: what the adapter says."),
    ] = None,
    revision: Annotated[
        str | None,
        typer.Option(help="Branch, tag or commit of a base model of the Hugging Face Hub. Default: main."),
    ] = None,
    dtype: Annotated[
        Literal["base", "bfloat16", "float32", "float16"],
        typer.Option(help="Type of the weights. base keeps the base model's, including FP8, MXFP4 and INT4."),
    ] = "base",
    data_dir: DataDir = DEFAULTS.data_dir,
    checkpoints_base: Annotated[
        str | None,
        typer.Option(
            envvar=environment_variable("checkpoints_base"),
            show_envvar=False,
            help="Where the server keeps checkpoints, if it was started with this option.",
        ),
    ] = None,
) -> None:
    """Write an adapter as a merged Hugging Face checkpoint, or for PEFT or Tinker.

    Takes any checkpoint of a server, which need not be running, and PEFT
    folders. Of a model all of whose weights were trained, writes the model.
    vLLM, SGLang, transformers and others load a merged model like any other.
    An interrupted export or upload continues when run again.
    """
    from spmd_tx.cli.export_destinations import open_destination
    from spmd_tx.cli.export_sources import NamedBase, is_whole, open_adapter
    from spmd_tx.coordinator.agent.base_model import find_config, find_model, fingerprint
    from spmd_tx.exports.adapter import base_model_of
    from spmd_tx.exports.adapter_formats import export_adapter
    from spmd_tx.exports.merged import export_merged, export_whole

    if form != "merged" and dtype != "base":
        raise StartError(f"--dtype {dtype} is for --format merged; factors of adapters are float32")
    with (
        open_destination(out, push_to_hub, is_private=private) as place,
        open_adapter(adapter, data_dir, checkpoints_base, NamedBase(base_model, revision)) as folder,
    ):
        of_weights = None if dtype == "base" else dtype
        if is_whole(folder):
            if form != "merged":
                raise StartError(
                    f"{adapter} is a complete model, and --format {form} is for adapters; leave it out"
                )
            export_whole(folder, place, of_weights, fingerprint(folder), _Progress())
        elif form == "merged":
            model_dir = find_model(base_model or base_model_of(folder), revision, tell)
            export_merged(folder, model_dir, place, of_weights, _Progress())
        else:
            config_dir = find_config(base_model or base_model_of(folder), revision)
            export_adapter(folder, config_dir, place, form, base_model)
    for written in filter(None, (out, push_to_hub)):
        typer.echo(written)


class _Progress:
    """Prints how much is written, now and then."""

    def __init__(self) -> None:
        self._next = time.monotonic() + NEWS_SECONDS

    def __call__(self, done: int, total: int) -> None:
        if time.monotonic() >= self._next:
            self._next = time.monotonic() + NEWS_SECONDS
            tell(f"{show_size(done)} of {show_size(total)} written")
