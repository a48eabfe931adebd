"""What is known of a program that was compiled for absent devices. Figures are of one device and one run."""

import msgspec

from spmd_tx.worker.aot.programs import WantedKind


class CollectiveReport(msgspec.Struct, frozen=True, kw_only=True):
    """Adds up the collectives of one name, type and number of devices."""

    name: str  # "all-reduce"
    dtype: str
    devices: int  # that exchange with each other
    between_hosts: bool
    count: float
    bytes: float  # of all: the larger of what a device gives and what it gets
    sent_bytes: float  # of all, in a ring


class CopyReport(msgspec.Struct, frozen=True, kw_only=True):
    """Tells of a large array of the worker, or a layer of it, that a program copies."""

    array: str  # "cache.keys", "one layer of base.layers.gate"
    operation: str  # of the HLO
    count: float
    bytes: float  # of all


class ProgramReport(msgspec.Struct, frozen=True, kw_only=True):
    """Says what one program needs and does. Of a decode whose steps XLA cannot count, it is one step."""

    name: str
    kind: WantedKind
    memory_bytes: int = 0  # that it needs while it runs, besides arguments and results
    planned_bytes: int | None = None  # that the plan has for it; None: it has no figure
    argument_bytes: int = 0
    result_bytes: int = 0  # without results that take the place of arguments
    flops: float = 0.0  # of products
    bytes_moved: float = 0.0  # to and from the device's memory
    collectives: list[CollectiveReport] = []
    launches: float = 0.0  # kernels, copies and collectives
    sorts: float = 0.0  # of at least hlo.cost.SMALLEST_SORT numbers
    sorted_numbers: float = 0.0  # of all sorts
    copies: list[CopyReport] = []
    roofline_seconds: float = 0.0  # at the vendor's figures
    expected_seconds: float = 0.0  # at those that programs usually reach
    parts: dict[str, float] = {}  # of the model (parts.py): seconds at those, one after the other
    tokens: int = 0  # of all devices, in one run; 0: it is not about tokens
    is_usual: bool = False  # whether predictions are made from it
    compile_seconds: float = 0.0
    error: str | None = None  # why it could not be compiled
    is_late: bool = False  # it was not compiled in the time that was given

    @property
    def has_figures(self) -> bool:
        return self.error is None and not self.is_late

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.expected_seconds if self.expected_seconds else 0.0


class Prediction(msgspec.Struct, frozen=True, kw_only=True):
    """Says how fast a server would be, on all devices together. Tokens are per second."""

    training_tokens: float
    prefill_tokens: float
    decode_tokens: float
    iteration_seconds: float  # of reinforcement learning, see predict.py
    iteration_sampling_seconds: float
    iteration_training_seconds: float
