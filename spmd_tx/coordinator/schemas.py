"""The Tinker wire format in JSON, field for field, under the SDK's names. Unknown fields are ignored.

Nullable fields are those that some released SDK sends as null. The ``type`` tags that clients send
are not read: the route, or the keys of a chunk, say the same.
"""

from typing import Annotated, Any, Literal

import msgspec

from spmd_tx.coordinator.compile_progress import ProgramsHealth
from spmd_tx.coordinator.user_metadata import WithMetadata

Text = Annotated[str, msgspec.Meta(pattern="^[^\\x00]*$")]  # what PostgreSQL can hold
Label = Annotated[str, msgspec.Meta(pattern="^[^\\x00]*$", max_length=1000)]  # kept in rows
Number = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
TrainingNumber = Annotated[int, msgspec.Meta(ge=1, le=2**63 - 1)]  # 0 is the creation of the model


class AdamParams(msgspec.Struct, frozen=True):
    learning_rate: float = 1e-4
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-12
    weight_decay: float = 0.0  # decoupled
    grad_clip_norm: float = 0.0  # global L2 norm; 0.0 disables clipping


class LoraConfig(msgspec.Struct, frozen=True):
    rank: int
    seed: int | None = None
    train_unembed: bool = True
    train_mlp: bool = True
    train_attn: bool = True


class OptimizerConfig(msgspec.Struct, frozen=True):
    type: str = "adamw"


class ModelInputChunk(msgspec.Struct, frozen=True):
    """A piece of a prompt. Exactly one of the first four is there; old clients send no type."""

    tokens: list[int] | None = None
    data: str | None = None  # an image, base64
    location: str | None = None  # an image elsewhere
    dmel: str | None = None  # audio, base64

    @property
    def kind(self) -> Literal["encoded_text", "image", "image_asset_pointer", "dmel", "unknown"]:
        if self.tokens is not None:
            return "encoded_text"
        if self.data is not None:
            return "image"
        if self.location is not None:
            return "image_asset_pointer"
        return "unknown" if self.dmel is None else "dmel"


class ModelInput(msgspec.Struct, frozen=True):
    chunks: list[ModelInputChunk]


class SamplingParams(msgspec.Struct, frozen=True):
    max_tokens: int | None = None  # None: as many as fit in the context
    seed: int | None = None
    stop: str | list[str | int] | None = None  # None: end of text; []: nothing stops but max_tokens
    temperature: float = 1.0  # 0 is greedy
    top_k: int = -1  # -1 is off
    top_p: float = 1.0


class TensorData(msgspec.Struct, frozen=True):
    data: list[float]
    dtype: str
    shape: list[int] | None = None
    sparse_crow_indices: list[int] | None = None
    sparse_col_indices: list[int] | None = None


# --- sessions ---------------------------------------------------------------------------------------


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
    type: Literal["success", "errored", "interrupted"] = "success"


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


class SessionsResponse(msgspec.Struct, frozen=True):
    sessions: list[str]


class ClientConfigResponse(msgspec.Struct, frozen=True):
    """Flags that steer the SDK; those not named here keep the SDK's defaults."""

    pjwt_auth_enabled: bool = False
    proto_compress_fwdbwd: bool = True
    parallel_fwdbwd_chunks: bool = True
    proto_write_fwdbwd: bool = True  # 0.19 - 0.24
    fwd_via_fwdbwd: bool = True  # 0.22 - 0.24
    create_model_via_load_weights: bool = True  # 0.24.1 - 0.36
    custom_loss_server_side: bool = True
    sample_use_retrieve_futures: bool = True  # one poll for all samples of a client (completions.py)
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


class StatusResponse(msgspec.Struct, frozen=True):
    status: str


class HealthResponse(msgspec.Struct, frozen=True, omit_defaults=True):
    status: str
    detail: str | None = None
    programs: ProgramsHealth | None = None


# --- models and training ----------------------------------------------------------------------------


class CreateModelRequest(WithMetadata, frozen=True):
    session_id: str
    model_seq_id: Number
    base_model: str
    user_metadata: dict[str, Any] | None = None
    lora_config: LoraConfig | None = None
    optimizer_config: OptimizerConfig | None = None


class GetInfoRequest(msgspec.Struct, frozen=True):
    model_id: str


class ModelData(msgspec.Struct, frozen=True):
    arch: str
    model_name: str
    tokenizer_id: str


class GetInfoResponse(msgspec.Struct, frozen=True, tag="get_info"):
    model_id: str
    model_data: ModelData
    model_name: str
    lora_rank: int
    is_lora: bool = True


class OptimStepRequest(msgspec.Struct, frozen=True):
    model_id: str
    seq_id: TrainingNumber
    adam_params: AdamParams | None = None  # None and no optimizer_params: all defaults
    optimizer_params: dict[str, Any] | None = None  # of another optimizer than AdamW


class SaveWeightsRequest(WithMetadata, frozen=True):
    model_id: str
    seq_id: TrainingNumber
    path: str | None = None  # a bare name
    ttl_seconds: int | None = None
    overwrite: bool = False
    user_metadata: dict[str, Any] | None = None


class LoadWeightsRequest(WithMetadata, frozen=True):
    """Into an existing model (model_id, seq_id), or creating one (session_id, model_seq_id)."""

    path: str
    optimizer: bool = False
    model_id: str | None = None
    seq_id: Number | None = None
    session_id: str | None = None
    model_seq_id: Number | None = None
    base_model: str | None = None
    user_metadata: dict[str, Any] | None = None
    optimizer_config: OptimizerConfig | None = None
    weights_access_token: str | None = None  # an API key with which the checkpoint can be read


class SaveWeightsForSamplerRequest(WithMetadata, frozen=True):
    """Under a name (path), or for one sampling session only (sampling_session_seq_id)."""

    model_id: str
    seq_id: TrainingNumber
    path: str | None = None  # a bare name
    sampling_session_seq_id: Number | None = None
    kind: Literal["snapshot", "inflight"] = "snapshot"  # inflight: moves on with later saves; without path
    ttl_seconds: int | None = None
    overwrite: bool = False
    user_metadata: dict[str, Any] | None = None


class FutureResponse(msgspec.Struct, frozen=True, omit_defaults=True):
    request_id: str
    model_id: str | None = None
    sample_sequence_ids: list[str] | None = None


# --- results of futures, as JSON --------------------------------------------------------------------


class CreateModelResult(msgspec.Struct, frozen=True, tag="create_model"):
    model_id: str


class OptimStepResult(msgspec.Struct, frozen=True):
    metrics: dict[str, float]


class SaveWeightsResult(msgspec.Struct, frozen=True, tag="save_weights"):
    path: str


class LoadWeightsResult(msgspec.Struct, frozen=True, tag="load_weights"):
    path: str
    model_id: str


class SaveWeightsForSamplerResult(msgspec.Struct, frozen=True, tag="save_weights_for_sampler"):
    path: str | None = None
    sampling_session_id: str | None = None


# --- sampling ---------------------------------------------------------------------------------------


class CreateSamplingSessionRequest(msgspec.Struct, frozen=True):
    session_id: str
    sampling_session_seq_id: Number
    base_model: str | None = None
    model_path: str | None = None


class CreateSamplingSessionResponse(msgspec.Struct, frozen=True, tag="create_sampling_session"):
    sampling_session_id: str


class SamplerResponse(msgspec.Struct, frozen=True):
    sampler_id: str
    base_model: str
    model_path: str | None = None


class SampleRequest(msgspec.Struct, frozen=True):
    prompt: ModelInput
    sampling_params: SamplingParams = SamplingParams()
    num_samples: int = 1
    sampling_session_id: str | None = None
    seq_id: Number | None = None
    base_model: str | None = None  # only from clients without sampling sessions
    model_path: str | None = None
    prompt_logprobs: bool | None = None
    prompt_logprobs_last_n: int | None = None
    topk_prompt_logprobs: int | None = None
    topk_sample_logprobs: int | None = None
    prompt_alt_tokens_k: int | None = None
    target_prompt_logprobs: TensorData | None = None
    record_stability_info: bool | None = None


# --- futures ----------------------------------------------------------------------------------------


class RetrieveFutureRequest(msgspec.Struct, frozen=True):
    request_id: Text


class CancelFutureRequest(msgspec.Struct, frozen=True):
    request_id: Text


class TryAgainResponse(msgspec.Struct, frozen=True, tag="try_again"):
    request_id: str
    queue_state: str
    queue_state_reason: str | None = None


class FailureResponse(msgspec.Struct, frozen=True):
    error: str
    category: str


# --- checkpoints ------------------------------------------------------------------------------------


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
