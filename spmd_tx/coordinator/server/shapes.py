"""Decides the sizes of commands, and which programs are compiled ahead of need."""

from spmd_tx.config import ServerConfig
from spmd_tx.coordinator.sampling.shapes import SamplingShapes
from spmd_tx.coordinator.scheduler.warm_up_menu import program_menu
from spmd_tx.coordinator.server.worker_setup import adapters_at_once
from spmd_tx.coordinator.training.attention_cost import attention_cost
from spmd_tx.coordinator.training.packing import TrainingShapes
from spmd_tx.models.declared.model import Model
from spmd_tx.protocol.memory_plan import MemoryPlan
from spmd_tx.protocol.programs import ProgramShape

COMMON_PATCHES = 1024, 4096  # of images of up to 512 and 1,024 pixels a side
MERGED = 4  # patches of a token


def sampling_shapes(config: ServerConfig, max_context: int, plan: MemoryPlan) -> SamplingShapes:
    """Decide the sizes of sampling commands."""
    return SamplingShapes(
        config.data_shards,
        max_context,
        config.page_size,
        plan.decode_rows,
        on_cpu=plan.on_cpu,
        batch_invariant=config.batch_invariant,
        speculates=config.speculation != "off",
        has_states=bool(plan.state_slots),
        draft_cost=plan.draft_cost,
        ridge=0.0 if plan.state_slots else plan.ridge_tokens,  # nothing but a Prefill reads into states
    )


def training_shapes(config: ServerConfig, model: Model, max_context: int, plan: MemoryPlan) -> TrainingShapes:
    """Decide the sizes of training commands."""
    return TrainingShapes(
        config.data_shards,
        plan.train_tokens,
        plan.block_tokens or (plan.train_tokens,),
        max_context,
        attention_cost(model),
        config.expert_shards,
    )


def make_menu(config: ServerConfig, model: Model, max_context: int, plan: MemoryPlan) -> list[ProgramShape]:
    """List what is to be compiled ahead of need."""
    shapes = training_shapes(config, model, max_context, plan) if config.trains else None
    menu = program_menu(shapes, sampling_shapes(config, max_context, plan), adapters_at_once(config))
    fitting = [each for each in COMMON_PATCHES if each <= MERGED * plan.image_tokens]
    return [*menu, *(ProgramShape(step="encode_images", patches=patches) for patches in fitting)]
