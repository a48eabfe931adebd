"""The JSON of checkpoints and training runs: listings, exports, copies and downloads."""

from typing import Any

import msgspec

from spmd_tx.coordinator.wire.fields import Label, Number, TrainingNumber


class SaveWeightsExternalRequest(msgspec.Struct, frozen=True):
    model_id: str
    seq_id: TrainingNumber
    path: str  # a bare name
    ttl_seconds: int | None = None
    age_encryption_recipients: list[str] | None = None  # None: the files are not encrypted


class SaveWeightsExternalResult(msgspec.Struct, frozen=True, tag="save_weights_external"):
    path: str
    size_bytes: int


class CopyWeightsRequest(msgspec.Struct, frozen=True):
    """Names a checkpoint, and a project's new session or a session's model number to copy it to."""

    source_path: str
    destination_project_id: Label | None = None
    session_id: str | None = None
    model_seq_id: Number | None = None
    ttl_seconds: int | None = None  # of the copy, whatever the source has
    weights_access_token: str | None = None  # an API key with which the source can be read


class CopyWeightsResponse(msgspec.Struct, frozen=True):
    tinker_path: str


class ExternalWeightsUrlsResponse(msgspec.Struct, frozen=True):
    urls: dict[str, str]  # by file path within the checkpoint
    expires: str  # RFC 3339


class Cursor(msgspec.Struct, frozen=True):
    offset: int
    limit: int
    total_count: int


class Checkpoint(msgspec.Struct, frozen=True):
    checkpoint_id: str  # "weights/NAME"
    checkpoint_type: str  # "training", "sampler" or "external"
    time: str  # RFC 3339
    tinker_path: str
    size_bytes: int | None = None
    public: bool = False
    user_metadata: dict[str, Any] | None = None
    expires_at: str | None = None  # RFC 3339


class CheckpointsResponse(msgspec.Struct, frozen=True):
    checkpoints: list[Checkpoint]
    cursor: Cursor | None = None


class TrainingRun(msgspec.Struct, frozen=True):
    training_run_id: str
    base_model: str
    model_owner: str
    is_lora: bool
    lora_rank: int
    last_request_time: str  # RFC 3339
    corrupted: bool = False
    last_checkpoint: Checkpoint | None = None
    last_sampler_checkpoint: Checkpoint | None = None
    user_metadata: dict[str, Any] | None = None


class TrainingRunsResponse(msgspec.Struct, frozen=True):
    training_runs: list[TrainingRun]
    cursor: Cursor


class SetTtlRequest(msgspec.Struct, frozen=True):
    ttl_seconds: int | None = None  # None: for ever


class WeightsInfoRequest(msgspec.Struct, frozen=True):
    tinker_path: str


class WeightsInfoResponse(msgspec.Struct, frozen=True):
    base_model: str
    lora_rank: int
    train_unembed: bool
    train_mlp: bool
    train_attn: bool
    is_lora: bool = True
