"""The wire format of exports, copies and downloads of checkpoints, as in schemas.py."""

import msgspec

from spmd_tx.coordinator.schemas import Label, Number, TrainingNumber


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
    """To a new session of a project, or to a model number of a session."""

    source_path: str
    destination_project_id: Label | None = None
    session_id: str | None = None
    model_seq_id: Number | None = None
    ttl_seconds: int | None = None  # the source's does not matter
    weights_access_token: str | None = None  # an API key with which the source can be read


class CopyWeightsResponse(msgspec.Struct, frozen=True):
    tinker_path: str


class ExternalWeightsUrlsResponse(msgspec.Struct, frozen=True):
    urls: dict[str, str]  # by path within the checkpoint
    expires: str  # RFC 3339
