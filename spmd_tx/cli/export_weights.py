"""``spmd-tx export`` writes a trained adapter for other servers and libraries, without a running server."""

import sys
import time
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from spmd_tx.byte_sizes import show_size

NEWS_SECONDS = 2.0  # between two lines of progress


class Format(StrEnum):
    """Names what an adapter is written as."""

    MERGED = "merged"
    PEFT = "peft"
    TINKER = "tinker"


class Dtype(StrEnum):
    """Names the types of a merged model's weights."""

    BASE = "base"
    BFLOAT16 = "bfloat16"
    FLOAT32 = "float32"
    FLOAT16 = "float16"


def export_weights(
    adapter: Annotated[Path, typer.Argument(metavar="ADAPTER", help="PEFT folder of the adapter.")],
    out: Annotated[Path, typer.Option(help="Folder to write; it must not exist.")],
    form: Annotated[
        Format,
        typer.Option(
            "--format",
            help="merged: a whole model. peft: an adapter for PEFT with transformers 5. "
            "tinker: an adapter as hosted Tinker has it.",
        ),
    ] = Format.MERGED,
    base_model: Annotated[
        str | None,
        typer.Option(help="Hugging Face id or directory. Default: what the adapter says."),
    ] = None,
    dtype: Annotated[
        Dtype,
        typer.Option(help="Type of the weights. base keeps the base model's, also FP8, MXFP4 and INT4."),
    ] = Dtype.BASE,
) -> None:
    """Write an adapter as a merged Hugging Face checkpoint, or for PEFT or Tinker.

    Takes the folder of a checkpoint for sampling or of an export, or one of
    PEFT's. A merged model is a model of its own, which vLLM, SGLang,
    transformers and others load; its export goes on where it was interrupted.
    """
    from spmd_tx.coordinator.agent.base_model import find_model
    from spmd_tx.errors import StartError
    from spmd_tx.exports.adapter import base_model_of
    from spmd_tx.exports.adapter_formats import export_adapter
    from spmd_tx.exports.merged import export_merged

    if form is not Format.MERGED and dtype is not Dtype.BASE:
        raise StartError(f"--dtype {dtype} is for --format merged; factors of adapters are float32")
    model_dir = find_model(base_model or base_model_of(adapter))
    if form is Format.MERGED:
        export_merged(adapter, model_dir, out, None if dtype is Dtype.BASE else dtype.value, _Progress())
    else:
        export_adapter(adapter, model_dir, out, form.value, base_model)
    typer.echo(str(out))


class _Progress:
    """Prints how much is written, now and then."""

    def __init__(self) -> None:
        self._next = time.monotonic() + NEWS_SECONDS

    def __call__(self, done: int, total: int) -> None:
        if time.monotonic() >= self._next:
            self._next = time.monotonic() + NEWS_SECONDS
            print(f"{show_size(done)} of {show_size(total)} written", file=sys.stderr, flush=True)
