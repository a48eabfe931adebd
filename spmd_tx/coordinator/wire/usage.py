"""The JSON of usage and of the audit log. Fields have the names of the SDK. All costs are 0."""

from datetime import datetime
from typing import Any

import msgspec


class TrainingEvent(msgspec.Struct, frozen=True, tag="training"):
    token_count: int
    forward_only: bool  # not in the SDK: tokens of forward


class PrefillEvent(msgspec.Struct, frozen=True, tag="sampling_prefill"):
    cached: bool
    token_count: int


class SampleEvent(msgspec.Struct, frozen=True, tag="sampling_sample"):
    token_count: int


class CheckpointEvent(msgspec.Struct, frozen=True, tag="checkpoint"):
    count: int


class StorageEvent(msgspec.Struct, frozen=True, tag="storage"):
    gigabyte_hours: float
    free: bool = True


EventInfo = TrainingEvent | PrefillEvent | SampleEvent | CheckpointEvent | StorageEvent


class UsageEvent(msgspec.Struct, frozen=True):
    """Says how much of one kind was used within an hour."""

    bucket_start: datetime
    bucket_end: datetime
    event_info: EventInfo
    base_model: str | None
    user_id: str
    user_name: str
    session_id: str | None
    project_id: str | None
    training_run_id: str | None  # not in the SDK; null: the base model
    api_key_id: str | None  # not in the SDK; the key that opened the session
    image_count: int = 0  # not in the SDK: of a run or sampler in this hour; in the first of its events
    estimated_cost_usd: float = 0.0
    effective_rate_usd_per_million_tokens: float | None = None
    effective_rate_usd_per_gigabyte_month: float | None = None


class UsageSession(msgspec.Struct, frozen=True):
    user_metadata: dict[str, str] | None


class UsageResponse(msgspec.Struct, frozen=True):
    data: list[UsageEvent]
    sessions: dict[str, UsageSession]
    cost_data_through: datetime | None = None  # null: nothing was billed
    next_offset: int | None = None  # not in the SDK: where the next page begins; null: there is none


class StorageItem(msgspec.Struct, frozen=True):
    """Says how much storage an owner's checkpoints in a project take now."""

    project_id: str | None
    org_user_urn: str
    user_name: str
    checkpoint_count: int
    size_bytes: int
    size_gigabytes: float
    user_email: str | None = None
    estimated_monthly_cost_usd: float = 0.0


class StorageResponse(msgspec.Struct, frozen=True):
    data: list[StorageItem]
    effective_rate_usd_per_gigabyte_month: float = 0.0


class AuditEntry(msgspec.Struct, frozen=True):
    timestamp: datetime
    event: str
    event_details: dict[str, Any]
    model_id: str | None = None  # for events of checkpoints
    tinker_path: str | None = None
    purpose: str | None = None  # for reads


class AuditResponse(msgspec.Struct, frozen=True):
    entries: list[AuditEntry]  # oldest first
    next_before: int | None = None  # not in the SDK: to ask for older ones of the day; null: there are none
