"""What a group expects of a sample before it is bound to it. Pure."""

from dataclasses import dataclass

FIRST_SPEED = 1000.0  # tokens a second, of drawing and of reading, before any were measured
LOAD_SECONDS = 0.1  # of weights that the group has to load first, about


@dataclass(frozen=True)
class SampleOffer:
    """Says how much is before a sample in a group, and how fast that goes."""

    waiting: int = 0  # tokens drawn before it at most, and for reading prompts as many as take as long
    unread: int = 0  # of its prompt, which the prefix cache lacks
    draws: float = FIRST_SPEED  # tokens a second, of all rows
    reads: float = FIRST_SPEED  # tokens a second
    must_load: bool = False

    @property
    def reading(self) -> int:
        """Return how many tokens could be drawn while what is unread is read."""
        return round(self.unread * self.draws / self.reads)

    @property
    def seconds(self) -> float:
        """Return after how many seconds its own tokens may be drawn."""
        return self.waiting / self.draws + self.unread / self.reads + LOAD_SECONDS * self.must_load
