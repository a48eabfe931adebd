"""The durable log of requests, and the waiting for their results."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Protocol

Kind = Literal[
    "create_model",
    "load_weights",
    "forward_backward",
    "forward",
    "optim_step",
    "save_weights",
    "save_weights_for_sampler",
    "sample",
]


@dataclass(frozen=True)
class Request:
    """A request that was accepted and will be answered."""

    number: int  # order of acceptance
    id: str  # request_id on the wire; unguessable
    kind: Kind
    line: str  # the model's id; for samples the sampler's
    seq_id: int  # place in the line; 0 is the model's creation
    session_id: str


@dataclass(frozen=True)
class Finished:
    """The result, encoded as the client wants it."""

    content_type: str
    body: bytes


@dataclass(frozen=True)
class Failed:
    """Why there will be no result, and whose fault it is."""

    error: str
    category: Literal["user", "server"]


Outcome = Finished | Failed


class RequestLog(Protocol):
    """What the scheduler uses of the queue."""

    on_arrival: Callable[[Request], None]  # called once per new request, when it is durable

    async def payload(self, request: Request) -> bytes:
        """The body as submitted: protobuf for forward_backward and forward, else JSON (schemas.py)."""
        ...

    def resolve(self, request_id: str, outcome: Outcome) -> None:
        """Store an outcome with the next group, then wake whoever waits for it."""
        ...
