"""The tables of the database. Times are seconds since the epoch."""

from typing import Any, Literal

import msgspec
from sqlalchemy import JSON, BigInteger, Index, Integer, String, UniqueConstraint, text
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from spmd_tx.protocol.commands import AdapterSpec
from spmd_tx.protocol.optimizers import OptimizerName

LOCAL_OWNER = "local"  # owns everything that was made without an API key

Role = Literal["user", "admin", "read-only"]


class Base(DeclarativeBase):
    """Says how Python types become columns."""

    type_annotation_map = {dict[str, Any]: JSON, list[str]: JSON}  # noqa: RUF012 (SQLAlchemy reads it)


def _index(name: str, *columns: str, where: str) -> Index:
    """Make an index of the rows that fulfil a condition."""
    return Index(name, *columns, sqlite_where=text(where), postgresql_where=text(where))


class SessionRow(Base):
    """Stores a session: one ServiceClient. Its models and samplers end with it."""

    __tablename__ = "sessions"

    id: Mapped[str] = mapped_column(primary_key=True)
    created_at: Mapped[float] = mapped_column(index=True)
    ended_at: Mapped[float | None] = mapped_column(index=True)
    ended_because: Mapped[str | None]
    tags: Mapped[list[str]]
    user_metadata: Mapped[dict[str, Any] | None]
    project_id: Mapped[str | None]
    display_name: Mapped[str | None]
    sdk_version: Mapped[str | None]
    owner: Mapped[str] = mapped_column(index=True, default=LOCAL_OWNER, server_default=LOCAL_OWNER)
    key_id: Mapped[str | None]  # the API key that it was opened with
    finish_reason: Mapped[str | None]  # what its client said: "success", "errored" or "interrupted"
    finish_detail: Mapped[str | None]


class ModelRow(Base):
    """Stores a model: one adapter in training, which listings call a training run."""

    __tablename__ = "models"

    id: Mapped[str] = mapped_column(primary_key=True)  # SESSION:train:N
    session_id: Mapped[str] = mapped_column(index=True)
    base_model: Mapped[str]
    rank: Mapped[int]
    alpha: Mapped[float]
    train_attn: Mapped[bool]
    train_mlp: Mapped[bool]
    train_unembed: Mapped[bool]
    optimizer: Mapped[OptimizerName] = mapped_column(String, default="adamw")
    user_metadata: Mapped[dict[str, Any] | None]
    created_at: Mapped[float] = mapped_column(index=True)
    # tinker:// path, or "an upload"; it only holds the copy, and cannot be trained
    copied_from: Mapped[str | None]
    name: Mapped[str | None]  # that people have given it; null: the one of its client
    run_group: Mapped[str | None]  # that people have put it into
    archived_at: Mapped[float | None]  # since when lists leave it out; null: they have it

    @property
    def adapter(self) -> AdapterSpec:
        return msgspec.convert(self, AdapterSpec, from_attributes=True)


class SamplerRow(Base):
    """Stores a sampler: frozen weights of a checkpoint, of an ephemeral version or of the base model."""

    __tablename__ = "samplers"

    id: Mapped[str] = mapped_column(primary_key=True)  # SESSION:sample:N
    session_id: Mapped[str] = mapped_column(index=True)
    base_model: Mapped[str]
    model_path: Mapped[str | None]  # tinker:// path of a named checkpoint
    model_id: Mapped[str | None]  # whose weights an ephemeral version is; both null: the base model
    version: Mapped[str | None]  # of the checkpoint it was opened with, or the request that saved the weights
    created_at: Mapped[float]
    clients: Mapped[int] = mapped_column(BigInteger, default=0)  # copies of its client in other processes
    inflight: Mapped[bool] = mapped_column(default=False)  # samples from the newest such weights of its model


class CheckpointRow(Base):
    """Stores a complete checkpoint, which is a folder."""

    __tablename__ = "checkpoints"
    __table_args__ = (UniqueConstraint("run_id", "kind", "name"),)

    number: Mapped[int] = mapped_column(primary_key=True)
    run_id: Mapped[str]  # id of the model that was saved
    kind: Mapped[str]  # checkpoint_paths.KINDS
    name: Mapped[str]
    size_bytes: Mapped[int] = mapped_column(BigInteger)
    is_public: Mapped[bool] = mapped_column(default=False)
    user_metadata: Mapped[dict[str, Any] | None]
    created_at: Mapped[float] = mapped_column(index=True)
    expires_at: Mapped[float | None] = mapped_column(index=True)
    owner: Mapped[str] = mapped_column(index=True, default=LOCAL_OWNER, server_default=LOCAL_OWNER)
    base_model: Mapped[str | None]  # null: not yet taken from the folder
    seq_id: Mapped[int | None] = mapped_column(BigInteger)  # of the save; null: of no run, or not known
    is_best: Mapped[bool] = mapped_column(default=False)  # of its run, as people have said

    @property
    def tinker_path(self) -> str:
        return f"tinker://{self.run_id}/{self.kind}/{self.name}"


class RequestFacts:
    """Holds what is known of a request, also after its row and its result are gone."""

    number: Mapped[int] = mapped_column(BigInteger, primary_key=True, autoincrement=False)
    kind: Mapped[str]
    line: Mapped[str]
    seq_id: Mapped[int] = mapped_column(BigInteger)
    session_id: Mapped[str] = mapped_column(index=True)
    created_at: Mapped[float]
    began_at: Mapped[float | None]  # its turn came; null: never
    sent_at: Mapped[float | None]  # its first command was sent
    replied_at: Mapped[float | None]  # its last command was answered
    tokens: Mapped[int | None] = mapped_column(BigInteger)  # read and sampled
    base: Mapped[str | None]  # key of the base model; null: the first one of the data directory


class RequestRow(RequestFacts, Base):
    """Stores an accepted request, then its outcome. Only small bodies are here; the others are in files."""

    __tablename__ = "requests"
    __table_args__ = (
        UniqueConstraint("line", "seq_id"),
        Index("ix_requests_unfinished", "finished_at", "number"),
        _index("ix_requests_unfinished_of_line", "line", "seq_id", where="finished_at IS NULL"),
        _index("ix_requests_coordinator_losses", "coordinator_losses", where="coordinator_losses > 0"),
        _index("ix_requests_given_up", "number", where="given_up IS NOT NULL"),
    )

    id: Mapped[str] = mapped_column(unique=True)
    payload_body: Mapped[bytes | None]  # null: it is in a file
    payload_file: Mapped[int | None] = mapped_column(BigInteger, index=True)
    payload_offset: Mapped[int | None] = mapped_column(BigInteger)
    payload_length: Mapped[int] = mapped_column(BigInteger)
    finished_at: Mapped[float | None]  # null: unfinished
    content_type: Mapped[str | None]  # of a result; null: failed
    result_body: Mapped[bytes | None]
    result_file: Mapped[int | None] = mapped_column(BigInteger, index=True)
    result_offset: Mapped[int | None] = mapped_column(BigInteger)
    result_length: Mapped[int | None] = mapped_column(BigInteger)  # null: there is none
    error: Mapped[str | None]
    category: Mapped[str | None]  # "user" or "server"
    executed: Mapped[bool] = mapped_column(default=False)  # its commands count: a replay runs it again
    digest: Mapped[str | None]  # of the outcome, to compare with a replay's
    layout: Mapped[str | None]  # how its micro-batches were cut (TrainingShapes)
    losses: Mapped[int] = mapped_column(default=0)  # generations that ended while its command was out
    losses_by_command: Mapped[int] = mapped_column(default=0)  # those that the command may have ended
    coordinator_losses: Mapped[int] = mapped_column(default=0)  # ends of the coordinator at work on it
    given_up: Mapped[str | None]  # the operator's reason to fail it
    never_again: Mapped[str | None]  # the operator's reason to refuse its model rather than run it again


class ImageRow(Base):
    """Stores an image that requests refer to, once for each owner. A small one is here, others in files."""

    __tablename__ = "images"
    __table_args__ = (UniqueConstraint("owner", "digest"),)

    number: Mapped[int] = mapped_column(BigInteger().with_variant(Integer, "sqlite"), primary_key=True)
    owner: Mapped[str]
    digest: Mapped[str]  # of the file
    created_at: Mapped[float]
    content_body: Mapped[bytes | None]  # null: it is in a file
    content_file: Mapped[int | None] = mapped_column(BigInteger, index=True)
    content_offset: Mapped[int | None] = mapped_column(BigInteger)
    content_length: Mapped[int] = mapped_column(BigInteger)
    patches: Mapped[str | None]  # digest of what it was decoded to first; null: it was not decoded yet


class RequestImage(Base):
    """Stores that the body of a request refers to an image."""

    __tablename__ = "request_images"

    request: Mapped[int] = mapped_column(BigInteger, primary_key=True, autoincrement=False)  # its number
    image: Mapped[int] = mapped_column(BigInteger, primary_key=True, autoincrement=False, index=True)


class PastRequest(RequestFacts, Base):
    """Keeps the times of a request for traces."""

    __tablename__ = "past_requests"

    finished_at: Mapped[float] = mapped_column(index=True)
    category: Mapped[str | None]  # of a failed one


class RunMetrics(Base):
    """Keeps the metrics of one training request, or what a client has sent about its run."""

    __tablename__ = "run_metrics"
    __table_args__ = (
        Index("ix_run_metrics_order", "line", "seq_id"),
        Index("ix_run_metrics_kind", "line", "kind"),
    )

    number: Mapped[int] = mapped_column(BigInteger().with_variant(Integer, "sqlite"), primary_key=True)
    line: Mapped[str]  # id of the model
    seq_id: Mapped[int] = mapped_column(BigInteger)  # of the request; a client's: the newest at the time
    kind: Mapped[str]  # "forward_backward", "optim_step" or "client"
    at: Mapped[float] = mapped_column(index=True)
    step: Mapped[int | None] = mapped_column(BigInteger)  # that a client has named, or of a thinned run
    metrics: Mapped[dict[str, Any]]  # by name; null: not finite


class SnapshotRow(Base):
    """Stores where a snapshot is: a model's state after one of its requests, as an Orbax checkpoint."""

    __tablename__ = "snapshots"

    model_id: Mapped[str] = mapped_column(primary_key=True)
    seq_id: Mapped[int] = mapped_column(BigInteger, primary_key=True)
    path: Mapped[str]
    optimizer: Mapped[bool]  # whether the optimizer's moments are restored, too
    adapter: Mapped[dict[str, Any]]  # AdapterSpec
    created_at: Mapped[float]
    size_bytes: Mapped[int] = mapped_column(BigInteger)


class ServerState(Base):
    """Stores what the server remembers of itself, in one row."""

    __tablename__ = "server"

    id: Mapped[int] = mapped_column(primary_key=True)  # 1
    generation: Mapped[int] = mapped_column(BigInteger)  # number of the last generation that was started
    had_keys: Mapped[bool] = mapped_column(default=False)  # whether there ever were API keys


class ApiKeyRow(Base):
    """Stores an API key, as a hash only."""

    __tablename__ = "keys"

    id: Mapped[str] = mapped_column(primary_key=True)  # names the key; not secret
    hash: Mapped[str] = mapped_column(unique=True)
    owner: Mapped[str]
    role: Mapped[Role] = mapped_column(String)
    created_at: Mapped[float]
    expires_at: Mapped[float | None]
    revoked_at: Mapped[float | None]
    last_used_at: Mapped[float | None]  # up to a minute old
    adapters: Mapped[int | None]  # this and the columns below are limits, see KeyLimits
    queued_requests: Mapped[int | None]
    queued_tokens: Mapped[int | None] = mapped_column(BigInteger)
    requests_per_second: Mapped[float | None]


class UsageRow(Base):
    """Stores how much a model was trained, or a sampler was sampled from, in one hour."""

    __tablename__ = "usage"

    hour: Mapped[int] = mapped_column(BigInteger, primary_key=True, autoincrement=False)  # its first second
    line: Mapped[str] = mapped_column(primary_key=True)  # id of the model or sampler
    session_id: Mapped[str]
    run_id: Mapped[str | None]  # whose weights they are; null: the base model's
    owner: Mapped[str] = mapped_column(index=True)
    key_id: Mapped[str | None]  # of the session
    base_model: Mapped[str | None]
    trained: Mapped[int] = mapped_column(BigInteger)  # tokens, here and below
    forwarded: Mapped[int] = mapped_column(BigInteger)
    prompt: Mapped[int] = mapped_column(BigInteger)
    cached: Mapped[int] = mapped_column(BigInteger)  # of the prompts' tokens
    sampled: Mapped[int] = mapped_column(BigInteger)
    checkpoints: Mapped[int]  # saved under a name
    images: Mapped[int] = mapped_column(BigInteger, default=0, server_default="0")


class StoredCheckpoint(Base):
    """Stores how long a checkpoint was on the disk."""

    __tablename__ = "stored_checkpoints"
    __table_args__ = (UniqueConstraint("run_id", "kind", "name", "created_at"),)

    number: Mapped[int] = mapped_column(primary_key=True)
    run_id: Mapped[str]
    kind: Mapped[str]
    name: Mapped[str]
    owner: Mapped[str] = mapped_column(index=True)
    session_id: Mapped[str | None]
    base_model: Mapped[str | None]
    size_bytes: Mapped[int] = mapped_column(BigInteger)
    created_at: Mapped[float]
    deleted_at: Mapped[float | None] = mapped_column(index=True)


class TrajectoryRow(Base):
    """Stores a trajectory: what one run of an agent has sampled."""

    __tablename__ = "trajectories"
    __table_args__ = (UniqueConstraint("owner", "name"),)

    id: Mapped[str] = mapped_column(primary_key=True)
    owner: Mapped[str]
    name: Mapped[str]
    created_at: Mapped[float]
    used_at: Mapped[float] = mapped_column(index=True)
    finished_at: Mapped[float | None]  # it takes no more turns
    model: Mapped[str | None]  # that all its turns sample from; null: what each call names
    settings: Mapped[dict[str, Any]]  # of sampling, where a call leaves them out
    user_metadata: Mapped[dict[str, Any] | None]
    reward: Mapped[float | None]
    metrics: Mapped[dict[str, Any] | None]
    turns: Mapped[int] = mapped_column(BigInteger)
    size_bytes: Mapped[int] = mapped_column(BigInteger)  # of its turns


class TurnRow(Base):
    """Stores a turn of a trajectory: a sample request, its place in the tree, and what came out."""

    __tablename__ = "turns"
    __table_args__ = (Index("ix_turns_order", "trajectory_id", "number"),)

    request_id: Mapped[str] = mapped_column(primary_key=True)
    number: Mapped[int] = mapped_column(BigInteger)  # order of acceptance
    trajectory_id: Mapped[str]
    session_id: Mapped[str]  # of its sampler
    parent: Mapped[str | None]  # REQUEST:NUMBER, with whose tokens its prompt begins; null: a root
    base: Mapped[str]  # key of the base model
    model: Mapped[str]  # as its client has named it
    weights: Mapped[str | None]  # tinker:// path; null: the base model's
    dialect: Mapped[str]
    agent: Mapped[str | None]  # which of several, as its client says
    cause: Mapped[str]  # BranchCause
    cause_message: Mapped[int | None] = mapped_column(BigInteger)
    reused: Mapped[int] = mapped_column(BigInteger)  # tokens of its prompt that the parent has
    new: Mapped[int] = mapped_column(BigInteger)  # tokens of its prompt that it adds
    prompt: Mapped[bytes]  # TurnPrompt
    created_at: Mapped[float]
    state: Mapped[str]  # TurnState
    finished_at: Mapped[float | None]
    sampled: Mapped[int | None] = mapped_column(BigInteger)  # tokens
    cached: Mapped[int | None] = mapped_column(BigInteger)  # tokens of its prompt that were cached
    samples: Mapped[bytes | None]  # TurnSamples
    rewards: Mapped[dict[str, Any] | None]  # TurnReward by the number of the sample


class AuditRow(Base):
    """Stores an audit event: who did what, and when."""

    __tablename__ = "audit"

    number: Mapped[int] = mapped_column(primary_key=True)
    at: Mapped[float] = mapped_column(index=True)
    event: Mapped[str]  # RESOURCE_ACTION
    actor: Mapped[str]  # an owner, or the operator
    key_id: Mapped[str | None]  # which of the actor's keys
    owner: Mapped[str] = mapped_column(index=True)  # of the thing it was done to
    details: Mapped[dict[str, Any]]
