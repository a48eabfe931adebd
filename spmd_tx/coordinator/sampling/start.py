"""What the start of samples takes, and what is kept of a prompt for samples that start later."""

from dataclasses import dataclass, field

import numpy as np

from spmd_tx.coordinator.sampling.cache.state_moves import Copy
from spmd_tx.coordinator.sampling.cache.state_slots import NOTHING
from spmd_tx.coordinator.sampling.job import Sample


@dataclass(frozen=True)
class Start:
    """Says what a Prefill must do for samples that become resident."""

    pages: list[int]  # of the common content, without its last token
    written: int  # how many of its first tokens the pages hold already
    cached: int  # those of them that were found in the prefix cache
    copies: dict[Sample, Copy]  # a partly filled last page is copied for each sample that does not own it
    experts: np.ndarray | None = None  # of a mixture: [found, L, C]
    # With a hit, before anything is read: its partly filled last page, and its state.
    first_pages: list[Copy] = field(default_factory=list)
    first_states: list[Copy] = field(default_factory=list)
    kept_states: list[Copy] = field(default_factory=list)  # at the end: the state of a kept prompt


@dataclass
class KeptPrompt:
    """Holds what samples that have yet to start find of their prompt."""

    pages: list[int]
    slot: int = NOTHING  # of its state, if the model keeps any
    is_read: bool = False  # whether planned commands fill the slot
