"""``spmd-tx plan`` calculates what fits on given devices, without the devices and without the weights."""

import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec
import typer

from spmd_tx.byte_sizes import show_size
from spmd_tx.cli.options import server_options
from spmd_tx.config import ServerConfig
from spmd_tx.errors import StartError
from spmd_tx.models.config import ModelConfig, read_model_config
from spmd_tx.protocol.memory_plan import MemoryPlan, choices, rows
from spmd_tx.worker.memory.accelerators import Devices, parse_devices

OPTIONS = (  # those of the server that decide what is in memory
    "base_model",
    "dtype",
    "max_context_length",
    "fully_sharded_data_parallel_size",
    "expert_parallel_size",
    "tensor_parallel_size",
    "shard_base_weights",
    "num_processes",
    "max_lora_adapters",
    "max_lora_rank",
    "train_tokens",
    "sampler_slots",
    "decode_rows",
    "decode_steps",
    "page_size",
    "kv_cache_tokens",
)
SIZES = OPTIONS[3:6]


@dataclass(frozen=True)
class Planned:
    """What ``spmd-tx plan`` prints."""

    config: ServerConfig
    devices: Devices
    plan: MemoryPlan

    @property
    def mesh(self) -> str:
        return ", ".join(f"--{size.replace('_', '-')} {getattr(self.config, size)}" for size in SIZES)


def plan(**options: Any) -> None:
    """Print how a server would use the memory of its devices, and how much work would fit.

    Needs neither the devices nor the weights, only the model's config.json.
    The other options are those of "spmd-tx serve". If the parallel sizes are
    left out, a mesh is proposed. If the model does not fit, the error shows
    the arithmetic and the options that would help.
    """
    del options["config"]  # its values came in as defaults of the other options
    devices = parse_devices(options.pop("devices"), options.pop("memory_per_device"))
    as_json = options.pop("json")
    planned = make(ServerConfig(**options), devices)
    if as_json:
        told = msgspec.to_builtins(planned.plan) | {size: getattr(planned.config, size) for size in SIZES}
        typer.echo(msgspec.json.format(msgspec.json.encode(told)).decode())
    else:
        show(planned)


def signature() -> inspect.Signature:
    """Return the signature from which typer reads the options."""
    of_server = server_options().parameters
    own = {
        "devices": Annotated[
            str, typer.Option(help="Number and kind of the devices, such as 8xh100, h200, 4xcpu or 8.")
        ],
        "memory_per_device": Annotated[
            str | None, typer.Option(help="Memory of one device, such as 80GiB, if its kind is not known.")
        ],
        "json": Annotated[bool, typer.Option("--json", help="Print the plan as JSON, with sizes in bytes.")],
    }
    defaults = {"memory_per_device": None, "json": False}
    parameters = [
        inspect.Parameter(
            name,
            inspect.Parameter.KEYWORD_ONLY,
            annotation=annotation,
            default=defaults.get(name, inspect.Parameter.empty),
        )
        for name, annotation in own.items()
    ]
    return inspect.Signature([*(of_server[name] for name in ("config", *OPTIONS)), *parameters])


plan.__signature__ = signature()  # pyright: ignore[reportFunctionMemberAccess]


def make(config: ServerConfig, devices: Devices) -> Planned:
    """Plan for the devices, and propose a mesh if none is given. Raises StartError if nothing fits."""
    from spmd_tx.coordinator.agent.base_model import find_config

    directory = find_config(config.base_model)
    model = read_model_config(directory)
    if config.mesh_size == 1 < devices.count:
        return _propose(config, model, devices)
    if config.mesh_size != devices.count:
        raise StartError(
            f"the mesh has {config.mesh_size} devices, the product of the three parallel sizes, but "
            f"--devices says {devices.count}; change either, or leave the sizes out to have them proposed"
        )
    return _planned(config, model, devices)


def _propose(config: ServerConfig, model: ModelConfig, devices: Devices) -> Planned:
    """Choose the least tensor parallelism with which training need not compute everything twice."""
    found: Planned | None = None
    refusal: StartError | None = None
    for sized in _meshes(config, model, devices.count):
        try:
            planned = _planned(sized, model, devices)
        except StartError as error:
            refusal = error
            continue
        found = found or planned
        if set(planned.plan.remat.values()) != {"full"}:
            return planned
    if found is not None:
        return found
    assert refusal is not None, "without tensor parallelism there is always a mesh"
    raise refusal


def _meshes(config: ServerConfig, model: ModelConfig, count: int) -> Iterator[ServerConfig]:
    for tp in (tp for tp in range(1, count + 1) if count % tp == 0):
        ep = 1
        while model.n_experts and model.n_experts % (2 * ep) == 0 and (count // tp) % (2 * ep) == 0:
            ep *= 2
        yield msgspec.structs.replace(
            config,
            fully_sharded_data_parallel_size=count // tp // ep,
            expert_parallel_size=ep,
            tensor_parallel_size=tp,
        )


def _planned(config: ServerConfig, model: ModelConfig, devices: Devices) -> Planned:
    from spmd_tx.coordinator.server.preflight import check_mesh, context_length
    from spmd_tx.coordinator.server.worker_setup import make_setup
    from spmd_tx.worker.memory.offline import plan_offline

    check_mesh(config, model)
    setup = make_setup(config, None, context_length(config, model))

    return Planned(config, devices, plan_offline(setup, model, devices))


def show(planned: Planned) -> None:
    from rich.console import Console
    from rich.table import Table

    devices, console = planned.devices, Console()
    whole = "" if devices.bytes is None else f", {show_size(devices.bytes)} each"
    console.print(f"{planned.config.base_model} on {devices.count} x {devices.kind or 'device'}{whole}")
    console.print(planned.mesh)
    table = Table("of each device", "memory", "")
    for row in rows(planned.plan):
        table.add_row(*row)
    console.print(table)
    for what, choice in choices(planned.plan):
        console.print(f"{what}: {choice}")
    console.print(
        "These are calculated values. Workers measure their programs when they start, where the platform "
        "allows it, and correct the plan."
    )
