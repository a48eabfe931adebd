"""The JSON of models: creating them, training steps, saving and loading weights, custom losses.

Fields have the names of the SDK.
"""

from typing import Any, Literal

import msgspec

from spmd_tx.coordinator.wire.fields import NaturalNumber, TrainingNumber
from spmd_tx.coordinator.wire.metadata import WithMetadata
from spmd_tx.custom_loss.definition import LossInput, WireGraph


class AdamParams(msgspec.Struct, frozen=True):
    learning_rate: float = 1e-4
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-12
    weight_decay: float = 0.0  # decoupled
    grad_clip_norm: float = 0.0  # global L2 norm; 0.0 disables clipping


class DimuonParams(msgspec.Struct, frozen=True):
    learning_rate: float
    grad_clip_norm: float = 0.0  # as AdamW's; less than 0 disables clipping, too
    beta1: float = 0.9


class LoraConfig(msgspec.Struct, frozen=True):
    rank: int
    seed: int | None = None
    train_unembed: bool = True
    train_mlp: bool = True
    train_attn: bool = True


class OptimizerConfig(msgspec.Struct, frozen=True, omit_defaults=True):
    type: str
    version: int | None = None  # AdamW has none


class CreateModelRequest(WithMetadata, frozen=True):
    session_id: str
    model_seq_id: NaturalNumber
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
    optimizer_config: OptimizerConfig
    is_lora: bool = True


class OptimStepRequest(msgspec.Struct, frozen=True):
    model_id: str
    seq_id: TrainingNumber
    adam_params: AdamParams | None = None  # None and no optimizer_params: all defaults
    optimizer_params: dict[str, Any] | None = None  # of an optimizer other than AdamW


class SaveWeightsRequest(WithMetadata, frozen=True):
    model_id: str
    seq_id: TrainingNumber
    path: str | None = None  # a bare name
    ttl_seconds: int | None = None
    overwrite: bool = False
    user_metadata: dict[str, Any] | None = None


class LoadWeightsRequest(WithMetadata, frozen=True):
    """Loads into an existing model (model_id, seq_id), or creates one (session_id, model_seq_id)."""

    path: str
    optimizer: bool = False
    model_id: str | None = None
    seq_id: NaturalNumber | None = None
    session_id: str | None = None
    model_seq_id: NaturalNumber | None = None
    base_model: str | None = None
    user_metadata: dict[str, Any] | None = None
    optimizer_config: OptimizerConfig | None = None
    weights_access_token: str | None = None  # an API key with which the checkpoint can be read


class SaveWeightsForSamplerRequest(WithMetadata, frozen=True):
    """Saves under a name (path), or for one sampling session only (sampling_session_seq_id)."""

    model_id: str
    seq_id: TrainingNumber
    path: str | None = None  # a bare name
    sampling_session_seq_id: NaturalNumber | None = None
    kind: Literal["snapshot", "inflight"] = "snapshot"  # inflight: follows later saves; has no path
    ttl_seconds: int | None = None
    overwrite: bool = False
    user_metadata: dict[str, Any] | None = None


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


class CreateCustomLossRequest(msgspec.Struct, frozen=True):
    session_id: str
    custom_loss_seq_id: NaturalNumber
    name: str
    inputs: list[LossInput]  # logprobs first
    graph: WireGraph


class CreateCustomLossResult(msgspec.Struct, frozen=True, tag="create_custom_loss"):
    loss_id: str
