"""The JSON of checkpoints and training runs: listings, exports, copies and downloads."""

from typing import Annotated, Any, Literal

import msgspec

from spmd_tx.coordinator.wire.fields import Label, NaturalNumber, Text, TrainingNumber
from spmd_tx.coordinator.wire.moments import Moment
from spmd_tx.coordinator.wire.sessions import OwnSearchOwner, SearchOwner
from spmd_tx.coordinator.wire.training import LoraConfig, OptimizerConfig

CheckpointType = Literal["training", "sampler", "external"]


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
    model_seq_id: NaturalNumber | None = None
    ttl_seconds: int | None = None  # of the copy, whatever the source has
    weights_access_token: str | None = None  # an API key with which the source can be read


class CopyWeightsResponse(msgspec.Struct, frozen=True):
    tinker_path: str


class ExternalWeightsUrlsResponse(msgspec.Struct, frozen=True):
    urls: dict[str, str]  # by file path within the checkpoint
    expires: str  # RFC 3339


class ExternalWeightsUploadStartRequest(msgspec.Struct, frozen=True):
    base_model: str
    lora_config: LoraConfig
    destination_project_id: Label | None = None


class ExternalWeightsUploadStartResponse(msgspec.Struct, frozen=True):
    upload_id: str
    urls: dict[str, str]  # by file, to be sent there with PUT
    expires: str  # RFC 3339


class ExternalWeightsUploadFinishRequest(msgspec.Struct, frozen=True):
    upload_id: str


class ExternalWeightsUploadFinishResponse(msgspec.Struct, frozen=True):
    tinker_path: str


class Cursor(msgspec.Struct, frozen=True):
    offset: int
    limit: int
    total_count: int


class Checkpoint(msgspec.Struct, frozen=True):
    checkpoint_id: str  # "weights/NAME"
    checkpoint_type: CheckpointType
    time: str  # RFC 3339
    tinker_path: str
    size_bytes: int | None = None
    public: bool = False
    user_metadata: dict[str, Any] | None = None
    expires_at: str | None = None  # RFC 3339
    base_model: str | None = None
    best: bool = False  # of its run, as people have said


class CheckpointSearchCursor(msgspec.Struct, frozen=True):
    """Names the last checkpoint of a page."""

    last_created_at: Moment
    last_checkpoint_uuid: Text


class CheckpointSearchRequest(msgspec.Struct, frozen=True):
    project_ids: list[Text] | None = None
    user_metadata: dict[str, str] = {}  # all of them must be those of the checkpoint
    checkpoint_type: CheckpointType | None = None
    owner: SearchOwner = OwnSearchOwner()
    base_models: list[Text] | None = None  # an empty list matches nothing
    limit: Annotated[int, msgspec.Meta(ge=1, le=200)] = 50
    cursor: CheckpointSearchCursor | None = None


class CheckpointSearchResponse(msgspec.Struct, frozen=True):
    checkpoints: list[Checkpoint]
    next_cursor: CheckpointSearchCursor | None = None


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
    optimizer_config: OptimizerConfig
    is_lora: bool = True
