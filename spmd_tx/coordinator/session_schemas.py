"""The wire format of the search for sessions, and of traces, under the SDK's names."""

from datetime import datetime
from typing import Annotated, Any, Literal

import msgspec

from spmd_tx.coordinator.moments import Moment
from spmd_tx.coordinator.schemas import Text

FinishType = Literal["success", "errored", "interrupted"]


class OwnSearchOwner(msgspec.Struct, frozen=True, tag="own"):
    """The caller's own sessions."""


class AccessibleSearchOwner(msgspec.Struct, frozen=True, tag="accessible"):
    """All that the caller may see."""


class UserSearchOwner(msgspec.Struct, frozen=True, tag="user"):
    """Those of some owners, as far as the caller may see them."""

    owner_urns: Annotated[list[Text], msgspec.Meta(min_length=1, max_length=10)]


class ActiveQuery(msgspec.Struct, frozen=True, tag="active"):
    pass


class CancelledQuery(msgspec.Struct, frozen=True, tag="cancelled"):
    """Nothing cancels a session here."""


class FailedQuery(msgspec.Struct, frozen=True, tag="failed"):
    """Nothing but its client ends a session with an error here."""


class ClientFinishedQuery(msgspec.Struct, frozen=True, tag="client_finished"):
    reasons: Annotated[list[FinishType], msgspec.Meta(min_length=1)] | None = None


StatusQuery = ActiveQuery | CancelledQuery | FailedQuery | ClientFinishedQuery


class SessionSearchCursor(msgspec.Struct, frozen=True):
    """The last session of a page."""

    last_created_at: Moment
    last_session_id: Text


class SessionSearchRequest(msgspec.Struct, frozen=True):
    session_id: Text | None = None
    project_ids: list[Text] | None = None
    user_metadata: dict[str, str] = {}
    display_name: Annotated[str, msgspec.Meta(min_length=1, max_length=1000)] | None = None
    owner: OwnSearchOwner | AccessibleSearchOwner | UserSearchOwner = OwnSearchOwner()
    statuses: Annotated[list[StatusQuery], msgspec.Meta(min_length=1)] | None = None
    limit: Annotated[int, msgspec.Meta(ge=1, le=200)] = 50
    cursor: SessionSearchCursor | None = None


class Active(msgspec.Struct, frozen=True, tag="active"):
    pass


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
    status: Active | ClientFinished | None  # None: its client fell silent
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


def as_texts(metadata: dict[str, Any] | None) -> dict[str, str] | None:
    """The SDK reads texts only; what else a client has sent is given as JSON."""
    if metadata is None:
        return None
    return {
        name: value if isinstance(value, str) else msgspec.json.encode(value).decode()
        for name, value in metadata.items()
    }
