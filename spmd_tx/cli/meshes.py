"""The meshes that given devices can form, and why none of them works if none does."""

from collections.abc import Iterator
from dataclasses import dataclass, field

from spmd_tx.config import ServerConfig
from spmd_tx.errors import DoesNotFit, StartError
from spmd_tx.models.declared.model import Model
from spmd_tx.options import AUTO
from spmd_tx.worker.memory.accelerators import Devices

Mesh = tuple[int, int, int]  # fsdp, ep, tp
MOST_TOLD = 8  # reasons in one message


def possible_meshes(config: ServerConfig, model: Model, devices: Devices) -> list[Mesh]:
    """Return the mesh that is given, or all with the sizes that are given. Raises StartError if none has."""
    count, given = devices.count, config.given_devices
    if config.mesh is not None:
        if given == count:
            return [config.mesh]
        raise StartError(
            f"the mesh has {given} devices, the product of the three parallel sizes, but "
            f"--devices says {count}; change either, or leave a size out to have it chosen"
        )
    if count % given:
        raise StartError(
            f"a mesh with {config.sizes_as_options} cannot have {count} devices, which {given} does not "
            "divide; change a size to one that divides their number, or leave it out to have it chosen"
        )
    meshes = list(_meshes(config, model, count))
    if not meshes:  # ep alone is left to be chosen, and would have to be all of the rest
        raise StartError(
            f"a mesh with {config.sizes_as_options} has {count} devices only if --expert-parallel-size is "
            f"{count // given}, which is not chosen for a model with {model.n_experts or 'no'} experts; add "
            "it, or leave a size out to have it chosen"
        )
    return meshes


def _meshes(config: ServerConfig, model: Model, count: int) -> Iterator[Mesh]:
    """Yield a mesh for each possible tensor parallelism, with the most expert parallelism."""
    given_fsdp, given_ep, given_tp = config.parallel_sizes
    for tp in (tp for tp in range(1, count + 1) if count % tp == 0 and given_tp in (AUTO, tp)):
        experts = [1 << power for power in range(16) if model.n_experts and model.n_experts % 2**power == 0]
        for ep in reversed(experts or [1]) if given_ep == AUTO else [given_ep]:
            fsdp, left = divmod(count // tp, ep)
            if not left and given_fsdp in (AUTO, fsdp):
                yield fsdp, ep, tp
                break


@dataclass
class Refusals:
    """Collects why meshes do not work."""

    config: ServerConfig  # as it was given
    devices: Devices
    _found: dict[Mesh, StartError] = field(default_factory=dict)

    def add(self, mesh: Mesh, error: StartError) -> None:
        self._found[mesh] = error

    def told(self, without: Mesh | None = None) -> list[str]:
        """Return each reason once, with the meshes that it rules out."""
        meshes: dict[str, list[str]] = {}
        for mesh, error in self._found.items():
            if mesh != without:
                meshes.setdefault(_briefly(error), []).append(shown(mesh))
        return [f"{' and '.join(names)}: {reason}" for reason, names in meshes.items()]

    def error(self) -> StartError:
        """Return the error if no mesh is left. What would help is said of the mesh that needs the least."""
        first, *rest = self._found.values()
        brief = _briefly(first)
        if all(_briefly(each) == brief and str(each) == str(first) for each in rest):
            return first
        too_large = {mesh: error for mesh, error in self._found.items() if isinstance(error, DoesNotFit)}
        least = min(too_large, key=lambda mesh: too_large[mesh].needed, default=None)
        others = self.told(without=least)
        if len(others) > MOST_TOLD:
            others[MOST_TOLD:] = [f"There are {len(others) - MOST_TOLD} more reasons like these"]
        given = f" with {self.config.sizes_as_options}" if self.config.sizes_as_options else ""
        parts = [f"no mesh (fsdp, ep, tp) of {self.devices}{given} works", *others]
        if least is not None:
            parts.append(f"{shown(least)} needs the least memory, but {too_large[least]}")
        return StartError(". ".join(parts))


def _briefly(error: StartError) -> str:
    return error.briefly if isinstance(error, DoesNotFit) else str(error)


def shown(mesh: Mesh) -> str:
    return ", ".join(map(str, mesh))
