"""The JSON of trajectories: of what agents have sampled, and of the sequences to train on."""

from datetime import datetime
from typing import Annotated, Any, Literal

import msgspec

from spmd_tx.coordinator.wire.fields import Text
from spmd_tx.coordinator.wire.metadata import WithMetadata

NAME_CHARACTERS = 128
TrajectoryName = Annotated[
    str, msgspec.Meta(pattern=rf"^[A-Za-z0-9][A-Za-z0-9._@+-]{{0,{NAME_CHARACTERS - 1}}}$")
]
Leaves = Literal["kept", "last", "all"]
TrajectorySort = Literal["created", "used", "name", "turns", "size", "reward"]
KEEP = "keep"
TrajectoryMetrics = dict[Text, float]


class SamplingSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Says how turns are sampled whose calls leave it out."""

    temperature: Annotated[float, msgspec.Meta(ge=0)] | None = None
    top_p: Annotated[float, msgspec.Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, msgspec.Meta(ge=-1)] | None = None
    max_tokens: Annotated[int, msgspec.Meta(ge=1)] | None = None
    seed: int | None = None
    # keep: one long prompt, also where the model's chat template writes earlier turns in another way now.
    history: Literal["keep"] | None = None


class CreateTrajectoryRequest(WithMetadata, frozen=True, forbid_unknown_fields=True):
    name: TrajectoryName | None = None  # None: its id
    model: Text | None = None  # that all turns sample from, whatever calls name
    settings: SamplingSettings = SamplingSettings()
    user_metadata: dict[str, Any] | None = None


class CreateKeyRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    expires_seconds: Annotated[float, msgspec.Meta(gt=0, le=30 * 24 * 3600)] = 24 * 3600.0


class TrajectoryKey(msgspec.Struct, frozen=True):
    """Holds a key that can only sample in one trajectory."""

    key: str
    expires_at: datetime
    base_urls: dict[str, str]  # by dialect


class TrajectoryReward(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Rewards a turn, or the whole trajectory. A later one replaces it."""

    reward: float
    turn: Text | None = None  # REQUEST:NUMBER; None: the trajectory
    metrics: TrajectoryMetrics | None = None


class TrajectoryEntry(msgspec.Struct, frozen=True, kw_only=True):
    """Describes a trajectory."""

    id: str
    name: str
    owner: str
    state: Literal["open", "finished"]
    created_at: datetime
    used_at: datetime
    model: str | None  # the pinned one, or that of the newest turn
    # Of the newest turn: a tinker:// path, or the id of a sampling session; null: the base model's.
    weights: str | None
    turns: int
    prompt_tokens: int  # of all turns
    reused_tokens: int  # those of them that a turn before has
    cached_tokens: int  # those of them that were in the prefix cache
    sampled_tokens: int
    roots: int  # turns that go on from none
    branches: int  # turns that none goes on from
    size_bytes: int
    reward: float | None
    metrics: dict[str, Any] | None
    user_metadata: dict[str, Any] | None


class TrajectoryList(msgspec.Struct, frozen=True):
    trajectories: list[TrajectoryEntry]
    cursor: str | None = None  # of the next page


class TurnCall(msgspec.Struct, frozen=True):
    name: str
    arguments: str
    id: str | None = None


class TurnMessage(msgspec.Struct, frozen=True, omit_defaults=True):
    role: str
    text: str = ""
    reasoning: str = ""
    calls: list[TurnCall] = []
    call_id: str | None = None
    images: int = 0  # how many it has


class TurnEntry(msgspec.Struct, frozen=True, kw_only=True):
    """Describes a sample of a turn, and its place in the tree."""

    id: str  # REQUEST:NUMBER
    parent: str | None
    cause: str  # why it stands there
    cause_message: int | None  # the first message that differs
    state: Literal["open", "sampled", "failed", "cut"]
    model: str
    weights: str | None
    dialect: str
    agent: str | None
    created_at: datetime
    finished_at: datetime | None
    new_messages: list[TurnMessage]  # of its prompt, behind the parent
    reused_tokens: int
    new_tokens: int
    cached_tokens: int | None
    sampled_tokens: int
    message: TurnMessage | None  # what was sampled
    status: str | None  # what is wrong with it, "ok" if nothing is
    stop_reason: str | None
    reward: float | None
    metrics: dict[str, Any] | None
    tokens: list[str] = []  # the texts of its sampled tokens, if they are asked for
    logprobs: list[float] = []
    forced: list[bool] = []  # whether a grammar left no choice of each token


class TrajectoryTree(msgspec.Struct, frozen=True):
    trajectory: TrajectoryEntry
    turns: list[TurnEntry]
    cursor: str | None = None  # of the next page


class SequencesRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Selects trajectories by ids or by the beginning of their names."""

    ids: Annotated[list[Text], msgspec.Meta(max_length=10_000)] | None = None
    name: Text | None = None
    leaves: Leaves = "kept"
    cursor: Text | None = None


class SegmentSpan(msgspec.Struct, frozen=True, array_like=True):
    """Says where a run of tokens comes from, as a span of provenance does."""

    sequence_id: str
    kind: Literal["prompt", "sampled"]
    offset: int
    length: int


class SegmentTurn(msgspec.Struct, frozen=True):
    id: str
    model: str
    weights: str | None
    start: int  # of its sampled tokens, in the segment
    length: int
    state: str
    reward: float | None
    trains: bool  # False: another segment has its weight


class SegmentImage(msgspec.Struct, frozen=True, kw_only=True):
    """Says which tokens of a segment stand for an image."""

    start: int  # its first token
    length: int  # its tokens: expected_tokens of an ImageChunk
    data: str  # its file, PNG or JPEG, in base64


class Segment(msgspec.Struct, frozen=True, kw_only=True):
    """Holds turns that go on from each other, as one sequence of N tokens."""

    trajectory_id: str
    name: str
    reward: float | None  # of the trajectory
    cause: str  # why it begins
    tokens: list[int]  # [N]
    sampled: list[bool]  # [N]; False: nothing to train on
    forced: list[bool]  # [N]; True: a grammar left no choice of a token that the model had to write
    logprobs: list[float]  # [N], nats; 0 in prompts
    spans: list[SegmentSpan]
    turns: list[SegmentTurn]
    images: list[SegmentImage] = []  # in the order of their places; their tokens mean nothing


class SequencesResponse(msgspec.Struct, frozen=True):
    segments: list[Segment]
    cursor: str | None = None  # of the next page
