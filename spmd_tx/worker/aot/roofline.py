"""How long a program takes at least, from the arithmetic, traffic and messages of its operations."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from spmd_tx.hlo.cost import Cost, DeviceOperation
from spmd_tx.worker.memory.accelerators import Accelerator

# What programs reach of the vendors' figures, in predictions: products of usual sizes, kernels of attention
# to rows, streams of memory, rings of usual messages. An H200 has reached 0.67 to 0.72 in products, 0.31 to
# 0.40 in attention to rows of 2,048 and 8,192 tokens, and 0.73 in a copy. The others are assumptions.
ARITHMETIC_SHARE, MESSAGE_SHARE = 0.67, 0.8
ATTENTION_SHARE, TRAFFIC_SHARE = {"gpu": 0.33, "tpu": 0.67}, {"gpu": 0.73, "tpu": 0.9}
ATTENTION = re.compile(r"/attention_(?:forward|grad_queries|grad_keys)/pallas_call$")  # attention/flash*.py
LAUNCH_SECONDS = 2.5e-6  # of a kernel on a GPU; a TPU's program is one
MESSAGE_SECONDS = {"gpu": 10e-6, "tpu": 2e-6}  # until the first byte of a collective has arrived


@dataclass(frozen=True)
class Speeds:
    """Holds per second what a device computes, moves and sends."""

    flops: float
    bandwidth: float  # bytes, of its memory
    links: float  # bytes, within a host or a slice
    network: float  # bytes, between hosts
    launch: float = 0.0  # seconds, of each operation
    message: float = 0.0  # seconds, of each collective
    attention: float = 0.0  # operations, of kernels of attention to rows; 0: as others

    @classmethod
    def peak(cls, device: Accelerator) -> "Speeds":
        """Return the vendor's figures."""
        return cls(device.flops, device.bandwidth, device.links, device.network)

    @classmethod
    def expected(cls, device: Accelerator) -> "Speeds":
        """Return what programs may be expected to reach."""
        return cls(
            ARITHMETIC_SHARE * device.flops,
            TRAFFIC_SHARE[device.platform] * device.bandwidth,
            MESSAGE_SHARE * device.links,
            MESSAGE_SHARE * device.network,
            LAUNCH_SECONDS if device.platform == "gpu" else 0.0,
            MESSAGE_SECONDS[device.platform],
            ATTENTION_SHARE[device.platform] * device.flops,
        )


def seconds(cost: Cost, speeds: Speeds, hosts: Sequence[int]) -> float:
    """Return the time of one run. ``hosts`` names the host of each device of the mesh.

    An operation takes as long as its arithmetic or its traffic, whichever takes longer. Collectives that run
    beside others cost only what the others do not cover.
    """
    busy = beside = 0.0
    for each in cost.operations:
        spent = each.times * seconds_of(each, speeds, hosts)
        if each.collective is not None and each.collective.is_asynchronous:
            beside += spent
        else:
            busy += spent
    return max(busy, beside)


def seconds_of(operation: DeviceOperation, speeds: Speeds, hosts: Sequence[int]) -> float:
    """Return the time that an operation takes each time that it runs."""
    if operation.collective is not None:
        return _message(operation, speeds, hosts)
    is_attention = speeds.attention and ATTENTION.search(operation.source)
    flops = speeds.attention if is_attention else speeds.flops
    return max(operation.flops / flops, operation.bytes / speeds.bandwidth, speeds.launch)


def crosses_hosts(operation: DeviceOperation, hosts: Sequence[int]) -> bool:
    """Say whether a collective has to go over the network."""
    groups = operation.collective.groups if operation.collective is not None else ()
    return any(len({hosts[one] for one in group if one < len(hosts)}) > 1 for group in groups)


def _message(operation: DeviceOperation, speeds: Speeds, hosts: Sequence[int]) -> float:
    assert operation.collective is not None
    speed = speeds.network if crosses_hosts(operation, hosts) else speeds.links
    return speeds.message + operation.collective.sent_bytes / speed
