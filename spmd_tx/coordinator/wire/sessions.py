"""The JSON of sessions, their search and traces, and of the server's configuration and health.

Fields have the names of the SDK. Nullable fields are those that some released SDK sends as null. The ``type``
tags of clients are not read where the route says the same.
"""

from datetime import datetime
from typing import Annotated, Any, Literal

import msgspec

from spmd_tx.coordinator.wire.fields import Label, Text
from spmd_tx.coordinator.wire.metadata import WithMetadata
from spmd_tx.coordinator.wire.moments import Moment

FinishType = Literal["success", "errored", "interrupted"]


class ProgramsHealth(msgspec.Struct, frozen=True, omit_defaults=True):
    """Says how far the warm-up is."""

    ready: int  # programs, as below
    planned: int
    compiling: str | None = None  # "forward_backward 4x256"


class OwnSearchOwner(msgspec.Struct, frozen=True, tag="own"):
    """Selects the caller's own."""


class AccessibleSearchOwner(msgspec.Struct, frozen=True, tag="accessible"):
    """Selects all that the caller may see."""


class UserSearchOwner(msgspec.Struct, frozen=True, tag="user"):
    """Selects what belongs to some owners, as far as the caller may see it."""

    owner_urns: Annotated[list[Text], msgspec.Meta(min_length=1, max_length=10)]


SearchOwner = OwnSearchOwner | AccessibleSearchOwner | UserSearchOwner


class ActiveQuery(msgspec.Struct, frozen=True, tag="active"):
    pass


class CancelledQuery(msgspec.Struct, frozen=True, tag="cancelled"):
    """Matches no session: nothing cancels a session here."""


class FailedQuery(msgspec.Struct, frozen=True, tag="failed"):
    """Matches no session: only its client ends a session with an error here."""


class ClientFinishedQuery(msgspec.Struct, frozen=True, tag="client_finished"):
    reasons: Annotated[list[FinishType], msgspec.Meta(min_length=1)] | None = None


StatusQuery = ActiveQuery | CancelledQuery | FailedQuery | ClientFinishedQuery


class SessionSearchCursor(msgspec.Struct, frozen=True):
    """Names the last session of a page."""

    last_created_at: Moment
    last_session_id: Text


class SessionSearchRequest(msgspec.Struct, frozen=True):
    session_id: Text | None = None
    project_ids: list[Text] | None = None
    user_metadata: dict[str, str] = {}
    display_name: Annotated[str, msgspec.Meta(min_length=1, max_length=1000)] | None = None
    owner: SearchOwner = OwnSearchOwner()
    statuses: Annotated[list[StatusQuery], msgspec.Meta(min_length=1)] | None = None
    limit: Annotated[int, msgspec.Meta(ge=1, le=200)] = 50
    cursor: SessionSearchCursor | None = None


class Active(msgspec.Struct, frozen=True, tag="active"):
    silent_seconds: float | None = None  # since the client's last heartbeat; null: the next is not late


class FinishedFor(msgspec.Struct, frozen=True):
    type: str  # FinishType


class ClientFinished(msgspec.Struct, frozen=True, tag="client_finished"):
    reason: FinishedFor
    detail: str | None = None


class SessionSummary(msgspec.Struct, frozen=True):
    session_id: str
    created_at: datetime
    owner: str
    project_id: str  # "": none
    status: Active | ClientFinished | None  # None: ended because its client fell silent
    checkpoints_count: int
    checkpoint_storage_bytes: int
    display_name: str | None
    user_metadata: dict[str, str] | None


class SessionSearchResponse(msgspec.Struct, frozen=True):
    sessions: list[SessionSummary]
    next_cursor: SessionSearchCursor | None = None


class TraceExportResponse(msgspec.Struct, frozen=True, omit_defaults=True):
    status: Literal["pending", "ready", "failed"]
    url: str | None = None
    error: str | None = None


class CreateSessionRequest(WithMetadata, frozen=True):
    tags: Annotated[list[Label], msgspec.Meta(max_length=100)] = msgspec.field(default_factory=list)
    user_metadata: dict[str, Any] | None = None
    sdk_version: Label | None = None
    project_id: Label | None = None
    display_name: Label | None = None


class CreateSessionResponse(msgspec.Struct, frozen=True, tag="create_session"):
    session_id: str
    info_message: str | None = None


class SessionHeartbeatRequest(msgspec.Struct, frozen=True):
    session_id: str


class SessionHeartbeatResponse(msgspec.Struct, frozen=True, tag="session_heartbeat"):
    pass


class FinishReason(msgspec.Struct, frozen=True):
    type: FinishType = "success"


class FinishSessionRequest(msgspec.Struct, frozen=True):
    reason: FinishReason = FinishReason()
    detail: Text | None = None


class SetProjectRequest(msgspec.Struct, frozen=True):
    project_id: Label | None = None


class SessionResponse(msgspec.Struct, frozen=True):
    training_run_ids: list[str]
    sampler_ids: list[str]
    user_metadata: dict[str, str] | None = None
    display_name: str | None = None
    is_open: bool = True
    silent_seconds: float | None = None  # as in a search; the SDK does not read it
    next_offset: int | None = None  # not in the SDK: where more IDs begin; null: these are all


class SessionsResponse(msgspec.Struct, frozen=True):
    sessions: list[str]


class ClientConfigResponse(msgspec.Struct, frozen=True):
    """Sets flags of the SDK; flags that are not named here keep the SDK's defaults."""

    pjwt_auth_enabled: bool = False
    proto_compress_fwdbwd: bool = True
    parallel_fwdbwd_chunks: bool = True
    proto_write_fwdbwd: bool = True  # 0.19 - 0.24
    fwd_via_fwdbwd: bool = True  # 0.22 - 0.24
    create_model_via_load_weights: bool = True  # 0.24.1 - 0.36
    custom_loss_server_side: bool = True
    sample_use_retrieve_futures: bool = True  # one poll for all samples of a client
    sample_join_sampling_session: bool = True


class DynamicConfigResponse(msgspec.Struct, frozen=True):
    refresh_interval_sec: int = 300
    sample_cancel_enabled: bool = True
    sample_cancel_max_batch_size: int = 64


class SupportedModel(msgspec.Struct, frozen=True):
    model_name: str
    max_context_length: int
    trainable: bool = True
    sampleable: bool = True


class ServerCapabilitiesResponse(msgspec.Struct, frozen=True):
    supported_models: list[SupportedModel]


class GroupHealthResponse(msgspec.Struct, frozen=True, omit_defaults=True):
    """Says how a group of workers is, of a server that has several."""

    base_model: str
    state: str  # "waiting for agents", "starting", "ready", "draining", "restarting" or "failed"
    detail: str | None = None  # what it does, or why it has failed
    programs: ProgramsHealth | None = None


class HealthResponse(msgspec.Struct, frozen=True, omit_defaults=True):
    status: str
    detail: str | None = None
    programs: ProgramsHealth | None = None
    groups: dict[str, GroupHealthResponse] | None = None  # by name; null: there is one


def as_texts(metadata: dict[str, Any] | None) -> dict[str, str] | None:
    """Metadata as the SDK reads it: values that are not texts become JSON."""
    if metadata is None:
        return None
    return {
        name: value if isinstance(value, str) else msgspec.json.encode(value).decode()
        for name, value in metadata.items()
    }
