"""A request as it goes over the wire, and the names that a client has learned for its next ones."""

from dataclasses import dataclass, field
from random import Random
from typing import Any

BASE_MODEL = "tiny"
API, OPENAI, ANTHROPIC = "/api/v1/", "/oai/api/v1/", "/anthropic/api/v1/"
JSON, PROTOBUF = "application/json", "application/x-protobuf"


@dataclass(frozen=True)
class Call:
    """One request of HTTP."""

    method: str
    path: str
    body: bytes | None = None
    content_type: str = JSON
    is_poll: bool = False  # it may wait for long, and is left after a while
    is_refused: bool = False  # it asks for what nobody can do, and may not be taken

    def __str__(self) -> str:
        body = b"" if self.body is None else self.body
        shown = body if len(body) <= 1500 else body[:1400] + b" ... " + body[-60:]
        text = shown.decode(errors="backslashreplace") if self.content_type == JSON else shown.hex()
        return f"{self.method} {self.path[:400]} {text}"


@dataclass
class Names:
    """Of one session; lists of what was answered only hold what a choice falls back from when it is empty."""

    session: str = "none"
    rank: int = 4  # of models; 0: the server trains all weights
    requests: list[str] = field(default_factory=list)
    losses: list[tuple[str, list[dict[str, Any]]]] = field(default_factory=list)  # with their inputs
    links: list[str] = field(default_factory=list)
    trajectories: list[str] = field(default_factory=list)
    turns: dict[str, list[Any]] = field(default_factory=dict)  # what was answered in a dialect, to go on from
    training_number: int = 0
    sample_number: int = 0
    other_number: int = 0  # of models, samplers and losses

    @property
    def model(self) -> str:
        return f"{self.session}:train:0"

    @property
    def sampler(self) -> str:
        return f"{self.session}:sample:0"

    def checkpoint(self, kind: str, name: str = "ck") -> str:
        return f"tinker://{self.model}/{kind}/{name}"

    @property
    def latest_request(self) -> str:
        return self.requests[-1] if self.requests else "none"

    def next_training(self) -> int:
        self.training_number += 1
        return self.training_number

    def next_sample(self) -> int:
        self.sample_number += 1
        return self.sample_number

    def next_other(self) -> int:
        self.other_number += 1
        return self.other_number


def pick(random: Random, known: list[Any], instead: Any) -> Any:
    """One of those known. Draws one number, whatever is known, so that what follows stays the same."""
    place = random.random()
    return known[int(place * len(known))] if known else instead
