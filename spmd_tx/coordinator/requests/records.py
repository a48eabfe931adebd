"""The types of the log: requests, outcomes, their times and places, and the log's interface. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Literal, NamedTuple, TypeVar

import msgspec

from spmd_tx.coordinator.runtime import clock
from spmd_tx.coordinator.tenancy.spent import NO_USAGE, Usage
from spmd_tx.coordinator.wire.fields import storable
from spmd_tx.coordinator.wire.training_protobuf import JSON
from spmd_tx.errors import UNREADABLE, InvalidRequest

RequestStage = Literal["began", "sent", "replied", "compiling", "compiled"]

RequestKey = tuple[str, int]  # line, seq_id

RequestKind = Literal[
    "create_model",
    "load_weights",
    "forward_backward",
    "forward",
    "optim_step",
    "save_weights",
    "save_weights_for_sampler",
    "save_weights_external",
    "copy_weights",
    "upload_weights",
    "sample",
    "create_custom_loss",
]

# The kinds that change a model's state
CHANGES_STATE = frozenset[RequestKind]({"create_model", "load_weights", "forward_backward", "optim_step"})

# Only these come in chunks; any other kind waiting beyond a gap proves that the call with the gap is over.
CHUNKED_KINDS = frozenset({"forward", "forward_backward"})

# These leave nothing behind if none of their steps was sent.
WITHDRAWABLE = CHUNKED_KINDS | {"optim_step"}

Body = TypeVar("Body", bound=msgspec.Struct)


@dataclass
class RequestTimes:
    """Notes when a request reached its stages, in seconds since the epoch; None: not yet."""

    accepted_at: float = field(default_factory=clock.now)  # by this process
    began_at: float | None = None  # its turn in the line came, or its sampler was ready
    sent_at: float | None = None  # its first command went to the workers
    replied_at: float | None = None  # its last command was answered
    compiling_since: float | None = None  # it waits for a program
    compiled: tuple[tuple[float, float], ...] = ()  # when it waited for programs before
    trace: str | None = None  # the client's, as W3C's traceparent

    def note(self, stage: RequestStage) -> None:
        now = clock.now()
        match stage:
            case "began":
                self.began_at = self.began_at or now
            case "sent":
                self.sent_at = self.sent_at or now
            case "replied":
                self.replied_at = now
            case "compiling":
                self.compiling_since = self.compiling_since or now
            case "compiled" if self.compiling_since is not None:
                self.compiled += ((self.compiling_since, now),)
                self.compiling_since = None
            case "compiled":
                pass


class BodyPlace(NamedTuple):
    """Says where in the files a body is."""

    file: int
    offset: int
    length: int


BodyRef = BodyPlace | bytes  # a body in a file, or a small one, which its row holds


@dataclass(frozen=True)
class Request:
    """Identifies a request that was accepted and will be answered."""

    number: int  # order of acceptance
    id: str  # request_id on the wire; unguessable
    kind: RequestKind
    line: str  # the model's id; for samples the sampler's
    seq_id: int  # place in the line; 0 is the model's creation
    session_id: str
    base: str | None = None  # key of the base model; None: the first one of the data directory

    def __str__(self) -> str:
        return f"{self.kind} {self.seq_id} of {self.line}"


class DrawnFacts(NamedTuple):
    """Describes the answers of one sample request."""

    prompt: int  # hash of its tokens
    answers: int
    cut_off: int  # answers that ended at their longest


class LearnedFacts(NamedTuple):
    """Holds the advantages that a training request gave to samples, as its provenance spans name them."""

    advantages: Mapping[str, Mapping[int, float]]  # by request and place; the mean over tokens that count


@dataclass(frozen=True)
class Finished:
    """Holds a result, encoded as the client wants it."""

    content_type: str
    body: bytes
    layout: str | None = None  # how the micro-batches were cut
    notes: Mapping[str, bytes] = field(default_factory=dict)  # about its samples, by kind (sample_notes.py)
    spent: Usage = field(default=NO_USAGE, compare=False)
    metrics: Mapping[str, float] = field(default_factory=dict, compare=False)  # that its run keeps
    rollouts: DrawnFacts | LearnedFacts | None = field(default=None, compare=False)

    @property
    def digest(self) -> str:
        return blake2b(self.body, digest_size=16).hexdigest()


@dataclass(frozen=True)
class Failed:
    """Says why there is no result, and whose fault it is."""

    error: str
    category: Literal["user", "server"]
    executed: bool = False  # its commands were executed, and count
    layout: str | None = None  # how their micro-batches were cut

    def __post_init__(self) -> None:
        """Make the error storable, since it may quote what clients wrote."""
        object.__setattr__(self, "error", storable(self.error))

    @property
    def digest(self) -> str | None:
        """None: the server is at fault, and another run may give another outcome."""
        if self.category == "server":
            return None
        return blake2b(self.error.encode(), digest_size=16).hexdigest()


Outcome = Finished | Failed


class Known(NamedTuple):
    """Says what is already in the log under a key."""

    id: str
    kind: str


class NewRow(NamedTuple):
    """Holds a request to be stored, with its outcome if it is refused."""

    request: Request
    payload: BodyRef
    refused: Failed | None
    accepted_at: float  # seconds since the epoch


class NewOutcome(NamedTuple):
    """Holds an outcome to be stored."""

    request: Request
    outcome: Outcome
    times: RequestTimes
    completion: int  # its number
    result: BodyRef | None = None  # where the body of a finished one is


class Executed(NamedTuple):
    """Holds a request whose commands count, with the digest of its outcome."""

    request: Request
    digest: str | None
    layout: str | None


class ModelHistory(NamedTuple):
    """Holds the requests that a model's state follows from."""

    executed: list[Executed]  # in order of seq_id
    closed: set[int]  # numbers of requests that were refused, or failed without an effect
    refusal: str | None  # why there is no model: its creation failed, or the operator has given it up
    is_created: bool  # False: the request that creates the model has no outcome yet


@dataclass(frozen=True)
class QueueStatus:
    """Says why a request waits. ``paused_capacity``: for space, for its program, or for workers.

    The third state of the wire, ``paused_rate_limit``, is not used: what was accepted waits for no rate.
    """

    queue_state: Literal["active", "paused_capacity"]
    reason: str | None


class LossCount(NamedTuple):
    """Counts the generations that were lost while a command of a request was out."""

    total: int
    by_command: int  # those that the command may have ended


def read_body(body: bytes, schema: type[Body]) -> Body:
    """Read a JSON body. Raises InvalidRequest when it does not parse."""
    try:
        return msgspec.json.decode(body, type=schema)
    except UNREADABLE as problem:
        raise InvalidRequest(f"the request does not parse: {problem}") from None


def json_result(result: msgspec.Struct) -> Finished:
    return Finished(JSON, msgspec.json.encode(result))


def not_run_again(line: str, seq_id: int, why: str) -> str:
    return f"{line} cannot be restored: request {seq_id} is not run again, it was {why}"


def by_operator(why: str) -> str:
    return f"given up by the operator: {why}" if why else "given up by the operator"
