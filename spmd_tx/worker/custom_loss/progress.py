"""One run of a custom loss: how much of it is done, and the time that it has taken."""

from dataclasses import dataclass, field

import numpy as np

from spmd_tx.custom_loss.arguments import printed
from spmd_tx.protocol.commands import CustomLoss
from spmd_tx.worker.custom_loss.messages import Taken


@dataclass
class LossRun:
    """Tracks a run. Its pieces are independent, so it can continue in any process."""

    command: CustomLoss
    name: str
    pieces: int | None = None  # None: not known yet
    next_piece: int = 0
    compile_seconds: float = 0.0
    run_seconds: float = 0.0
    ends: int = 0  # processes that ended while they ran it
    reported: str = ""  # the last progress that was reported
    _parts: list[Taken] = field(default_factory=list)

    @property
    def is_done(self) -> bool:
        return self.next_piece == self.pieces

    def seconds_left(self, is_compiling: bool) -> float | None:
        """Return the seconds left to it; None: no limit."""
        limits = self.command.limits
        if limits is None:
            return None
        if is_compiling:
            return limits.compile_seconds - self.compile_seconds
        return limits.run_seconds - self.run_seconds

    def spend(self, seconds: float, is_compiling: bool) -> None:
        if is_compiling:
            self.compile_seconds += seconds
        else:
            self.run_seconds += seconds

    def take(self, part: Taken) -> None:
        self._parts.append(part)
        self.next_piece += 1

    def arrays(self) -> dict[str, np.ndarray]:
        """Return the results of all datums, in their order."""
        order = np.concatenate([part.datums for part in self._parts])
        sizes = self.command.lengths.astype(np.int64) * np.maximum(self.command.widths[0], 1)
        gradients = [
            piece
            for part in self._parts
            for piece in np.split(part.gradients, np.cumsum(sizes[part.datums])[:-1])
        ]
        back = np.argsort(order)
        return {
            "losses": np.concatenate([part.losses for part in self._parts])[back],
            "metrics": np.concatenate([part.metrics for part in self._parts])[back],
            "gradients": np.concatenate([gradients[place] for place in back]),
        }

    def progress(self, is_compiling: bool) -> str:
        piece = f", piece {self.next_piece + 1} of {self.pieces}" if (self.pieces or 0) > 1 else ""
        return f"{'compiling' if is_compiling else 'running'} custom loss '{printed(self.name)}'{piece}"

    def too_slow(self, is_compiling: bool) -> str:
        """Return the message for its author when it has taken too long."""
        limits = self.command.limits
        assert limits is not None
        if is_compiling:
            return (
                f"compiling loss '{printed(self.name)}' takes more than {limits.compile_seconds:g} s "
                "(the limit custom_loss_compile_seconds), so this loss is not taken any more. Create it "
                "again with fewer sums, sorts and the like, and bring its inputs [T, K] to few widths"
            )
        return (
            f"running loss '{printed(self.name)}' on these datums takes more than "
            f"{limits.run_seconds:g} s (the limit custom_loss_run_seconds). Send fewer datums in one "
            "request, or shorter ones"
        )
