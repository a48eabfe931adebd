"""The places where trained weights can be, and the moves between them.

What is trained is an adapter, or all weights of the model.
"""

from typing import Literal, NamedTuple

import msgspec


class Place(msgspec.Struct, frozen=True, tag_field="place", tag=True):
    """Base of the places."""


class TrainSlot(Place, frozen=True, tag="train_slot"):
    """Holds the weights, the gradient and the optimizer's state of a model on the devices."""

    slot: int


class BankSlot(Place, frozen=True, tag="bank_slot"):
    """Holds the weights of a version for sampling on the devices. Slot 0 is the base model."""

    slot: int


class Idle(Place, frozen=True, tag="idle"):
    """Holds bit for bit what was in a slot, in the workers' host memory and beyond a limit in their files.

    ``name`` is unique among all models and versions.
    """

    name: str


class StateFolder(Place, frozen=True, tag="state_folder"):
    """Holds weights and the optimizer's state as an Orbax checkpoint.

    A training slot is also filled from a folder that has the weights alone.
    """

    path: str


class WeightsFolder(Place, frozen=True, tag="weights_folder"):
    """Holds the weights as a PEFT folder, or as a complete Hugging Face checkpoint."""

    path: str


class Fresh(Place, frozen=True, tag="fresh"):
    """Is where new adapters come from: A uniform, B zero; or the weights of the base model."""

    seed: int  # 0 <= seed < 2**63


Slot = TrainSlot | BankSlot
AnyPlace = TrainSlot | BankSlot | Idle | StateFolder | WeightsFolder | Fresh

MoveStep = Literal[
    "create_adapter",
    "save_sampler",
    "swap_out",
    "swap_in",
    "page_out",
    "page_in",
    "save_state",
    "load_state",
    "write_sampler",
    "load_sampler",
]
# What is carried: weights with the optimizer's state, weights alone, or all bits of a slot.
Form = Literal["state", "weights", "bits"]


class Pair(NamedTuple):
    """Describes the moves from one kind of place to another."""

    step: MoveStep  # names its programs, and the command
    carries: Form
    # Whether workers return once it is dispatched to the devices, so that the next command runs beside the
    # rest; the others wait for disks.
    is_dispatched: bool = True
    replies: tuple[str, ...] = ()  # metrics


LEFT = "host_bytes", "disk_bytes"  # that process 0 keeps idle in memory and in files
CAME = ("from_disk",)  # 1 or 0

# In the order in which programs are compiled ahead of need.
PAIRS: dict[tuple[type[Place], type[Place]], Pair] = {
    (Fresh, TrainSlot): Pair("create_adapter", "state", is_dispatched=False),
    (TrainSlot, BankSlot): Pair("save_sampler", "weights"),
    (TrainSlot, WeightsFolder): Pair("save_sampler", "weights"),
    (TrainSlot, Idle): Pair("swap_out", "bits", replies=LEFT),
    (Idle, TrainSlot): Pair("swap_in", "bits", replies=CAME),
    (BankSlot, Idle): Pair("page_out", "bits", replies=LEFT),
    (Idle, BankSlot): Pair("page_in", "bits", replies=CAME),
    (TrainSlot, StateFolder): Pair("save_state", "state", is_dispatched=False),
    (StateFolder, TrainSlot): Pair("load_state", "state", is_dispatched=False),
    (BankSlot, WeightsFolder): Pair("write_sampler", "weights"),
    (WeightsFolder, BankSlot): Pair("load_sampler", "weights", is_dispatched=False),
}

# Steps whose programs no other step has.
MOVE_STEPS: tuple[MoveStep, ...] = tuple(
    dict.fromkeys(pair.step for pair in PAIRS.values() if pair.step != "load_sampler")
)
# Where nothing is trained.
MOVE_STEPS_OF_SAMPLING: tuple[MoveStep, ...] = ("load_sampler", "page_out", "page_in")
