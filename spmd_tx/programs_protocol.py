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


class CompileCount(msgspec.Struct, frozen=True, kw_only=True):
    """What XLA has compiled for one program, or found in the persistent cache, since the worker started."""

    program: str  # "forward_backward"
    is_cached: bool
    count: int
    seconds: float


class CompileReport(msgspec.Struct, frozen=True, kw_only=True):
    """How far a worker's programs are."""

    ahead: str = ""  # what is being compiled ahead: "forward_backward 4x256"
    ready: int = 0
    planned: int = 0  # programs of its WarmUp
    counts: list[CompileCount] = []
