"""Describes compiled programs: by which shapes they are known, and how many are ready."""

from typing import Literal

import msgspec

from spmd_tx.protocol.places import PAIRS, MoveStep, Place


class ProgramShape(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, cache_hash=True):
    """Names a program by the shapes of the command that it is for; sizes that a step does not have are 0."""

    step: Literal[
        MoveStep,
        "optim_step",
        "dimuon_step",
        "forward",
        "forward_backward",
        "encode_images",
        "prefill",
        "decode",
    ]
    rows: int = 0  # over all data shards
    row_length: int = 0  # tokens
    logprobs: bool = False  # of a prefill
    table: int = 0  # pages
    active: int = 0  # adapters that a decode uses
    targets: int = 0  # of each position in training, where there are several
    sequences: bool = False  # whether there may be losses of whole sequences
    top: int = 0  # likeliest tokens of each position that sampling returns
    named: int = 0  # tokens of each position whose log-probabilities a prefill returns
    draws: int = 0  # tokens that a prefill draws at each position
    patches: int = 0  # of each image that is encoded, padded
    masked: bool = False  # whether rows of a decode may have masks and forced tokens
    speculative: bool = False  # whether rows of a decode may follow others
    chunk: int = 0  # tokens of a chunk of a prompt that the steps of a decode read, per data shard

    def __str__(self) -> str:
        sizes = [self.rows, self.row_length, self.targets, self.table, self.active, self.patches]
        scores = [self.top, self.named, self.draws]
        name = f"continued {self.step}" if self.step == "prefill" and self.table else self.step
        name = f"masked {name}" if self.masked else name
        name = f"speculative {name}" if self.speculative else name
        name += " of sequences" if self.sequences else ""
        name += f" beside a chunk of {self.chunk}," if self.chunk else ""
        name += " with scores" if self.step == "prefill" and any(scores) else ""
        name += " with logprobs" if self.logprobs and not any(scores) else ""
        return " ".join(filter(None, [name, "x".join(str(size) for size in sizes + scores if size)]))


def program_of_move(source: type[Place], target: type[Place]) -> ProgramShape:
    """Return the program of the moves from one kind of place to another."""
    return ProgramShape(step=PAIRS[source, target].step)


# Where a program comes from: XLA; its persistent cache, after tracing; or a file, without tracing.
Source = Literal["compiler", "cache", "store"]


class CompileCount(msgspec.Struct, frozen=True, kw_only=True):
    """Counts what was compiled for one program, or loaded instead, since the worker started."""

    program: str  # "forward_backward"
    source: Source
    count: int
    seconds: float


class CompileReport(msgspec.Struct, frozen=True, kw_only=True):
    """Says how far a worker's programs are."""

    counts: list[CompileCount] = []
    unforeseen: int = 0  # programs that a command had to wait for because they were not ordered ahead
