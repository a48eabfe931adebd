"""Translates the options of the server into what the workers are told."""

from pathlib import Path

from spmd_tx.byte_sizes import parse_size
from spmd_tx.config import AUTO, ServerConfig
from spmd_tx.coordinator.training.packing import row_lengths
from spmd_tx.protocol.commands import SPARE_BANK_SLOTS
from spmd_tx.protocol.setup import Setup


def make_setup(config: ServerConfig, directory: Path | None, max_context: int, expert_lora: str) -> Setup:
    """``directory`` is the model's, None where it is only planned; ``max_context`` is in tokens."""
    assert config.mesh is not None, "the mesh has not been chosen yet"
    fsdp, ep, tp = config.mesh
    return Setup(
        generation=0,  # each has its own number, and address
        num_processes=config.num_processes,
        jax_coordinator="",
        jax_port=config.jax_port,
        model_dir=str(directory or ""),
        model_name=config.model_name,
        dtype=config.dtype,
        fsdp=fsdp,
        ep=ep,
        tp=tp,
        shard_base_weights=config.shard_base_weights,
        adapter_slots=1 if config.full_parameters else config.max_lora_adapters,
        expert_lora=expert_lora,
        expert_weights=config.expert_weights,
        base_dtype=config.base_dtype,
        bank_slots=adapters_at_once(config),
        max_rank=config.max_rank or 1,
        full_copies=bank_slots(config) if config.full_parameters else 0,
        max_context=max_context,
        page_size=config.page_size,
        kv_cache_tokens=config.kv_cache_tokens,
        state_cache_bytes=None if config.state_cache == AUTO else parse_size(config.state_cache, whole=0),
        decode_rows=config.decode_rows * config.data_shards,
        decode_steps=config.decode_steps,
        compilation_cache=str(config.data_dir / "compilation_cache"),
        idle_adapters=str(config.data_dir / "idle_adapters"),
        kernel_choices=str(config.data_dir / "kernel_choices"),
        train_tokens=config.train_tokens,
        batch_invariant=config.batch_invariant,
        longest_row=row_lengths(max_context)[-1],
        loss_processes=config.bounds.custom_loss_processes,
        loss_memory_bytes=config.bounds.custom_loss_memory_bytes,
    )


def bank_slots(config: ServerConfig) -> int:
    """How many versions the device holds, and what else must be there."""
    return (1 if config.full_parameters else config.sampler_slots) + SPARE_BANK_SLOTS


def adapters_at_once(config: ServerConfig) -> int:
    """How many adapters a program of sampling can use; where all weights are trained, it is one of zeros."""
    return 1 if config.full_parameters else bank_slots(config)
