"""The base model of checkpoints: they never load into models of another one."""

from dataclasses import dataclass

from spmd_tx.coordinator.checkpoints.shapes import check_shapes
from spmd_tx.coordinator.checkpoints.store import OpenCheckpoint
from spmd_tx.coordinator.wire.checkpoint_paths import CheckpointPath
from spmd_tx.errors import InvalidRequest
from spmd_tx.models.declared.model import Model


@dataclass(frozen=True)
class CheckpointBase:
    """Identifies the base model of the models whose checkpoints are saved and loaded."""

    names: tuple[str, ...]  # the first one is written into manifests; it has had the others
    model: Model | None = None  # None: arrays are not compared

    @property
    def name(self) -> str:
        return self.names[0]

    @property
    def expert_lora(self) -> str | None:
        """The layout of factors for experts; None: it has no experts."""
        return self.model.expert_lora if self.model is not None and self.model.n_experts else None

    def check(self, path: CheckpointPath, opened: OpenCheckpoint) -> None:
        """Raise InvalidRequest for a checkpoint that models of this base cannot load. Blocks."""
        manifest = opened.manifest
        if manifest.base_model not in self.names:
            raise InvalidRequest(
                f"checkpoint {path} was trained on {manifest.base_model!r}, and this model is one of "
                f"{self.name!r}; use a checkpoint of that base model"
            )
        layout = manifest.expert_lora or "per-expert"
        if self.expert_lora and manifest.train_mlp and layout != self.expert_lora:
            raise InvalidRequest(
                f"checkpoint {path} has {layout} factors for experts, and this server has "
                f"{self.expert_lora} ones; use another checkpoint, or a server with --expert-lora {layout}"
            )
        if self.model is not None and not manifest.is_encrypted:
            check_shapes(f"checkpoint {path}", opened.folder, manifest, self.model, self.name)
