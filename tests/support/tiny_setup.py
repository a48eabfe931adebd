"""Makes the Setup for workers of a tiny model."""

from typing import Any

from spmd_tx.protocol.setup import Setup


def tiny_setup(**different: Any) -> Setup:
    """Return a Setup of one process and device, a context of 64 tokens and few slots."""
    usual: dict[str, Any] = {
        "generation": 0,
        "num_processes": 1,
        "jax_coordinator": "",
        "model_dir": "/model",
        "dtype": "auto",
        "fsdp": 1,
        "ep": 1,
        "tp": 1,
        "adapter_slots": 1,
        "bank_slots": 3,
        "max_rank": 8,
        "max_context": 64,
        "page_size": 4,
        "kv_cache_tokens": 0,
        "decode_rows": 4,
        "decode_steps": 4,
        "compilation_cache": "/cache",
        "idle_adapters": "/idle",
    }
    return Setup(**usual | different)
