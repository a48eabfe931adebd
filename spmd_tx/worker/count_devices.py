"""Prints, as JSON, which devices JAX finds on this host. It runs in a process that ends at once.

Usage: python -m spmd_tx.worker.count_devices
"""

import json
import os

# Before JAX opens the devices: other processes may use them at this moment.
os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"

import jax

from spmd_tx.worker.xla_flags import MEMORY_FRACTION

FRACTION = "XLA_PYTHON_CLIENT_MEM_FRACTION"


def device_fields() -> dict[str, str | int | None]:
    """Return the fields of DevicesFound that JAX knows."""
    os.environ.setdefault(FRACTION, MEMORY_FRACTION)
    devices = jax.local_devices()
    stats = [each.memory_stats() or {} for each in devices]
    limits = [each["bytes_limit"] for each in stats if "bytes_limit" in each]
    fraction = float(os.environ[FRACTION]) if devices[0].platform != "tpu" else 1.0  # TPUs give all they have
    return {
        "kind": devices[0].platform,
        "count": len(devices),
        "bytes": int(min(limits) / fraction) if limits else None,
    }


if __name__ == "__main__":
    print(json.dumps(device_fields()))
