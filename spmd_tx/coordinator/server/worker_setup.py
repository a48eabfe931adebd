"""Translates the options of the server into what the workers are told."""

from pathlib import Path

from spmd_tx.byte_sizes import parse_size
from spmd_tx.config import OPTIONS, ServerConfig
from spmd_tx.coordinator.training.packing import row_lengths
from spmd_tx.group_names import is_replica
from spmd_tx.options import AUTO
from spmd_tx.protocol.commands import SPARE_BANK_SLOTS
from spmd_tx.protocol.setup import Setup

USUAL_SLOTS = 8  # for training, where there is room for them


def make_setup(config: ServerConfig, directory: Path | None, max_context: int, expert_lora: str) -> Setup:
    """Pass on the options that Setup has by the same name, and calculate the rest.

    ``directory`` is the model's, None where it is only planned; ``max_context`` is in tokens.
    """
    assert config.mesh is not None, "the mesh has not been chosen yet"
    fsdp, ep, tp = config.mesh
    passed_on = {name: getattr(config, name) for name in OPTIONS if name in Setup.__struct_fields__}
    calculated = {
        "host_processes": config.host_processes,
        "generation": 0,  # each has its own number, and address
        "jax_coordinator": "",
        "model_dir": str(directory or ""),
        "model_name": config.model_name,
        "fsdp": fsdp,
        "ep": ep,
        "tp": tp,
        "adapter_slots": training_slots(config),
        "may_have_fewer_slots": config.max_lora_adapters == AUTO,
        "expert_lora": expert_lora,
        "bank_slots": adapters_at_once(config),
        "max_rank": config.max_rank or 1,
        "full_copies": bank_slots(config) if config.full_parameters else 0,
        "max_context": max_context,
        "state_cache_bytes": None if config.state_cache == AUTO else parse_size(config.state_cache, whole=0),
        "compilation_cache": str(compilation_cache(config)),
        "idle_adapters": str(config.group_dir / "idle_adapters"),
        "kernel_choices": str(config.data_dir / "kernel_choices"),
        "image_tokens": None if config.image_tokens == AUTO else config.image_tokens,
        "image_tokens_each": config.bounds.image_tokens_each,
        "longest_row": row_lengths(max_context)[-1],
        "loss_processes": config.bounds.custom_loss_processes,
        "loss_memory_bytes": config.bounds.custom_loss_memory_bytes,
    }
    return Setup(**passed_on | calculated)


def compilation_cache(config: ServerConfig) -> Path:
    """Return the folder of compiled programs. They are code: replicas write to one of their own."""
    return (config.template_dir if is_replica(config.group) else config.data_dir) / "compilation_cache"


def training_slots(config: ServerConfig) -> int:
    """How many models the device holds for training; workers may choose fewer where it is auto."""
    if not config.trains:
        return 0
    if config.full_parameters:
        return 1
    return USUAL_SLOTS if config.max_lora_adapters == AUTO else config.max_lora_adapters


def bank_slots(config: ServerConfig) -> int:
    """How many versions the device holds, and what else must be there."""
    return (1 if config.full_parameters else config.sampler_slots) + SPARE_BANK_SLOTS


def adapters_at_once(config: ServerConfig) -> int:
    """How many adapters a program of sampling can use; where all weights are trained, it is one of zeros."""
    return 1 if config.full_parameters else bank_slots(config)
