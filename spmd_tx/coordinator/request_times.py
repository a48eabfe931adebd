"""When a request came how far. Kept in memory until its outcome is stored, and then written with it."""

from dataclasses import dataclass
from typing import Literal

from spmd_tx.coordinator.runtime import clock

Stage = Literal["began", "sent", "replied"]


@dataclass
class RequestTimes:
    """In seconds since the epoch; None: it has not come so far."""

    began_at: float | None = None  # its turn in the line came, or its sampler was there
    sent_at: float | None = None  # its first command went to the workers
    replied_at: float | None = None  # its last command was answered

    def note(self, stage: Stage) -> None:
        now = clock.now()
        match stage:
            case "began":
                self.began_at = self.began_at or now
            case "sent":
                self.sent_at = self.sent_at or now
            case "replied":
                self.replied_at = now
