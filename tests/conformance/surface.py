"""What the installed SDK offers: its public methods and commands, found by looking at it."""

import inspect
from collections.abc import Iterator

import click
import tinker
from tinker.cli.__main__ import main_cli
from tinker.lib.public_interfaces.api_future import AwaitableConcurrentFuture

CLIENTS = (
    tinker.ServiceClient,
    tinker.TrainingClient,
    tinker.SamplingClient,
    tinker.RestClient,
    tinker.AdminClient,
)
FUTURES = (tinker.APIFuture, AwaitableConcurrentFuture)
FORWARDING = {  # futures that have all methods of the client that they will be
    tinker.BackcompatTrainingClientFuture: tinker.TrainingClient,
    tinker.BackcompatSamplingClientFuture: tinker.SamplingClient,
}


def methods() -> list[str]:
    """Of clients and futures, as Class.method; properties and static methods, too."""
    names = [f"{cls.__name__}.{name}" for cls in (*CLIENTS, *FUTURES) for name in public_names(cls)]
    for cls, client in FORWARDING.items():
        known = public_names(client) | public_names(tinker.APIFuture)
        names += [f"{cls.__name__}.{name}" for name in sorted(public_names(cls) - known)]
        names += [f"{cls.__name__}.{name}" for name in sorted(public_names(tinker.APIFuture))]
    return names


def public_names(cls: type) -> set[str]:
    return {name for name, _ in inspect.getmembers(cls) if not name.startswith("_")}


def commands() -> list[str]:
    """All commands that do something, as "tinker checkpoint list"."""
    context = click.Context(main_cli, info_name="tinker")
    return sorted(_leaves(main_cli, context, "tinker"))


def _leaves(command: click.Command, context: click.Context, name: str) -> Iterator[str]:
    if not isinstance(command, click.Group):
        yield name
        return
    for child in command.list_commands(context):
        found = command.get_command(context, child)
        assert found is not None
        yield from _leaves(found, click.Context(found, info_name=child, parent=context), f"{name} {child}")
