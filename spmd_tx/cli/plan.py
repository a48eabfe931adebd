"""``spmd-tx plan`` calculates what fits on given devices, without the devices and without the weights."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from spmd_tx.byte_sizes import show_size
from spmd_tx.cli import compile
from spmd_tx.cli.compile import Wish
from spmd_tx.cli.meshes import Mesh, Refusals, possible_meshes
from spmd_tx.cli.options import GroupNameOption, gather_groups, takes_options
from spmd_tx.cli.plan_hints import Planned, hints
from spmd_tx.config import ServerConfig
from spmd_tx.errors import StartError
from spmd_tx.group_names import MAIN, template_of
from spmd_tx.group_options import read_pairs, with_groups
from spmd_tx.models.config import read_model_config
from spmd_tx.models.declared.model import Model
from spmd_tx.protocol.memory_plan import choices, rows
from spmd_tx.worker.memory.accelerators import Devices, parse_devices


@takes_options("plan")
def plan(
    *,
    context: typer.Context,
    devices: Annotated[
        list[str],
        typer.Option(
            help="Number and kind of the devices, such as 8xh100, v5e:2x4, 4xcpu or 8; GROUP=8xh100, which "
            "can be repeated, plans for a group of the file of --config, or for the first one, main."
        ),
    ],
    memory_per_device: Annotated[
        str | None, typer.Option(help="Memory of one device, such as 80GiB, if its kind is not known.")
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the plan as JSON, with sizes in bytes.")
    ] = False,
    compiles: Annotated[
        bool, typer.Option("--compile", help="Compile the server's programs for them; this takes minutes.")
    ] = False,
    only: Annotated[
        str,
        typer.Option(
            metavar="NAMES",
            help="With --compile: prefixes of programs' names, such as train,decode. Default: all.",
        ),
    ] = "",
    hlo: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="With --compile: folder for XLA's optimized HLO.")
    ] = None,
    minutes: Annotated[
        float, typer.Option(min=0, help="With --compile: print what is known after so many minutes.")
    ] = 60,
    group: GroupNameOption = "",
    **options: Any,
) -> None:
    """Print how a server would use the memory of its devices, and how much work would fit.

    Needs neither the devices nor the weights, only the model's config.json.
    The other options are those of "spmd-tx serve". Parallel sizes that are
    left out are chosen as the server would. If the model does not fit, the
    error shows the arithmetic and the options that would help.

    With --compile, the server's programs are compiled for these devices: what
    each needs and does, and how fast training and sampling could be. Parallel
    sizes that are left out are tried, and the fastest is named.
    """
    del options["config"]  # its values came in as defaults of the other options
    config = ServerConfig(**options)
    if len(devices) > 1 or "=" in devices[0]:
        if group or compiles:
            raise StartError("--devices names groups; leave out --group and --compile, or name none in it")
        config = with_groups(config, map(read_pairs, gather_groups(context, [])))
        plans = _plans_of_groups(config, devices, memory_per_device)
        if as_json:
            typer.echo(compile.in_json({name: _facts(planned) for name, planned in plans.items()}))
        for name, planned in {} if as_json else plans.items():
            typer.echo(f"group {name}:")
            show(planned)
        return
    parsed_devices = parse_devices(devices[0], memory_per_device)
    if group:
        config = with_groups(config, [read_pairs(group)]).groups[0]
    if compiles:
        names = tuple(name.strip() for name in only.split(",") if name.strip())
        compile.run(config, read_model(config), parsed_devices, Wish(names, hlo, minutes), as_json=as_json)
        return
    for option, value in (("--only", only), ("--hlo", hlo)):
        if value:
            raise StartError(f"{option} is {str(value)!r}, which has no effect without --compile; add that")
    planned = make(config, parsed_devices)
    if as_json:
        typer.echo(compile.in_json(_facts(planned)))
    else:
        show(planned)


def _plans_of_groups(config: ServerConfig, devices: Sequence[str], memory: str | None) -> dict[str, Planned]:
    """Plan for the devices of each group that is named, as "GROUP=8xh100". Raises StartError."""
    configs = {template_of(each.group): each for each in config.all_groups}  # replicas are alike
    plans = dict[str, Planned]()
    for pair in devices:
        name, equals, count = pair.partition("=")
        if not equals or name not in configs or name in plans:
            raise StartError(
                f"--devices is {pair}; with several, name a group in each once, as in {MAIN}=8xh100; the "
                f"groups are {', '.join(configs)}"
            )
        try:
            plans[name] = make(configs[name], parse_devices(count, memory))
        except StartError as error:
            raise StartError(f"group {name}: {error}") from None
    return plans


def _facts(planned: Planned) -> dict[str, Any]:
    return msgspec.to_builtins(planned.plan) | compile.sizes(planned.config) | {"why": planned.why}


def make(config: ServerConfig, devices: Devices) -> Planned:
    """Plan for the devices, and choose the sizes that are not given. Raises StartError if nothing fits."""
    model = read_model(config)
    meshes = possible_meshes(config, model, devices)
    if config.mesh is not None:
        return _planned(config, model, devices)
    return _choose(config, model, devices, meshes)


def read_model(config: ServerConfig) -> Model:
    """Read the model's configuration; its weights need not be there. Raises StartError.

    A context that the model does not have is refused here, once for all meshes.
    """
    from spmd_tx.coordinator.agent.base_model import find_config
    from spmd_tx.coordinator.server.preflight import context_length

    directory = find_config(config.base_model, config.revision)
    kept = config.planned_expert_lora, config.expert_weights, config.base_dtype
    model = read_model_config(directory, *kept, config.speculation)
    context_length(config, model)
    return model


def _choose(config: ServerConfig, model: Model, devices: Devices, meshes: Sequence[Mesh]) -> Planned:
    """Choose the least tensor parallelism with which training need not compute everything twice.

    Where nothing is trained, it is the least with which the model fits. Most training slots come first.
    """
    from spmd_tx.coordinator.server.worker_setup import training_slots

    fitting: list[Planned] = []
    refusals = Refusals(config, devices)
    for mesh in meshes:
        try:
            planned = _planned(config.with_mesh(mesh), model, devices)
        except StartError as error:
            refusals.add(mesh, error)
            continue
        fitting.append(planned)
        if _worth(planned) == (training_slots(config), True):
            break
    if not fitting:
        raise refusals.error()
    best = max(fitting, key=_worth)  # the first of equals
    if len(meshes) == 1:
        return replace(best, why="the only one for these devices")
    slots, is_quick = _worth(best)
    end = "training need not compute everything twice" if config.trains and is_quick else "the model fits"
    fewer = f" with {slots} adapters in training" if slots < training_slots(config) else ""
    return replace(best, why=f"the least tensor parallelism with which {end}{fewer}")


def _worth(planned: Planned) -> tuple[int, bool]:
    """How many slots for training there are, and whether it need not compute everything twice."""
    return planned.plan.adapter_slots, set(planned.plan.remat.values()) != {"full"}


def _planned(config: ServerConfig, model: Model, devices: Devices) -> Planned:
    from spmd_tx.coordinator.server.preflight import check_mesh, context_length
    from spmd_tx.coordinator.server.worker_setup import make_setup
    from spmd_tx.worker.memory.offline import plan_offline

    check_mesh(config, model)
    setup = make_setup(config, None, context_length(config, model), model.expert_lora)
    return Planned(config, model, devices, plan_offline(setup, model, devices))


def show(planned: Planned) -> None:
    from rich.console import Console
    from rich.table import Table

    devices, console = planned.devices, Console()
    whole = "" if devices.bytes is None else f", {show_size(devices.bytes)} each"
    console.print(f"{planned.config.base_model} on {devices}{whole}")
    console.print(planned.config.sizes_as_options + (f": {planned.why}" if planned.why else ""))
    table = Table("of each device", "memory", "")
    for row in rows(planned.plan):
        table.add_row(*row)
    console.print(table)
    for what, choice in choices(planned.plan):
        console.print(f"{what}: {choice}")
    for line in hints(planned, lambda config: _planned(config, planned.model, devices).plan):
        console.print(line, soft_wrap=True)
    console.print(
        "These are calculated values. Workers measure their programs when they start, where the platform "
        "allows it, and correct the plan."
    )
