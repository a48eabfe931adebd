"""The part of the contract that is about compiled programs: which there are, and what has become of them."""

from typing import Literal

import msgspec


class ProgramShape(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A program, by the shapes of the command that it is for; what a step does not have is 0."""

    step: Literal[
        "create_adapter",
        "optim_step",
        "save_sampler",
        "page_out",
        "save_state",
        "load_state",
        "load_sampler",
        "swap_out",
        "swap_in",
        "forward",
        "forward_backward",
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
    top: int = 0  # likeliest tokens of each position in sampling,
    named: int = 0  # tokens whose log-probabilities a prefill is asked for,
    draws: int = 0  # and tokens that it draws

    def __str__(self) -> str:
        sizes = [self.rows, self.row_length, self.targets, self.table, self.active]
        scores = [self.top, self.named, self.draws]
        name = f"continued {self.step}" if self.step == "prefill" and self.table else self.step
        name += " of sequences" if self.sequences else ""
        name += " with scores" if self.step == "prefill" and any(scores) else ""
        name += " with logprobs" if self.logprobs and not any(scores) else ""
        return " ".join(filter(None, [name, "x".join(str(size) for size in sizes + scores if size)]))


class CompileCount(msgspec.Struct, frozen=True, kw_only=True):
    """What XLA has compiled for one program, or found in the persistent cache, since the worker started."""

    program: str  # "forward_backward"
    is_cached: bool
    count: int
    seconds: float


class CompileReport(msgspec.Struct, frozen=True, kw_only=True):
    """How far a worker's programs are."""

    counts: list[CompileCount] = []
    unforeseen: int = 0  # programs that a command had to wait for, since nobody had ordered them
