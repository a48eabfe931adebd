"""Chooses the sizes of the mesh that the operator leaves open, for the devices that all hosts have."""

import asyncio
import logging
import math
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from spmd_tx.config import PARALLEL_SIZES, ServerConfig, as_words
from spmd_tx.coordinator.agent.devices import CPU
from spmd_tx.coordinator.mesh.roster import HostDevices
from spmd_tx.durable_files import make_folder, write_file
from spmd_tx.errors import UNREADABLE, StartError
from spmd_tx.options import AUTO
from spmd_tx.processes.environments import of_worker
from spmd_tx.processes.parent import tied

logger = logging.getLogger(__name__)

RECORDS = {"train": "mesh.json", "sample": "sampling_mesh.json"}  # by role


class ChosenMesh(msgspec.Struct, frozen=True):
    """Remembers the mesh of the last start."""

    mesh: tuple[int, int, int]  # fsdp, ep, tp
    num_processes: int


@dataclass
class MeshChoice:
    """Holds the configuration, whose mesh may still have to be chosen.

    The choice is kept in the data directory: as long as the devices stay the same, so does the mesh, and what
    is run again after a restart gives the same bits.
    """

    config: ServerConfig
    model_dir: Path
    _record: Path = field(init=False)

    def __post_init__(self) -> None:
        self._record = self.config.template_dir / RECORDS[self.config.role]
        if self.config.mesh is not None:
            self._note(self.config.mesh)

    async def settle(self, hosts: Sequence[HostDevices]) -> ServerConfig:
        """Choose the open sizes, so that all devices are used. Raises StartError if that cannot work."""
        config = self.config
        count = config.num_processes * devices_of_each(config, hosts)
        device = hosts[0].found
        known = self._known()
        if known is not None and known.num_processes == config.num_processes and _fits(config, known, count):
            mesh, why = known.mesh, f"as it was before; {self._record} remembers it"
        elif config.given_devices == count:
            mesh, why = _completed(config), "the only one for these devices"
        else:
            mesh, why = await self._planned(count, device.kind, device.bytes)
        self.config = config.with_mesh(mesh)
        logger.info("mesh of %d x %s: %s (%s)", count, device.kind, self.config.sizes_as_options, why)
        await asyncio.to_thread(self._note, mesh)
        return self.config

    async def _planned(self, count: int, kind: str, size: int | None) -> tuple[tuple[int, int, int], str]:
        """Ask ``spmd-tx plan``, which needs JAX, in a process of its own."""
        arguments = ["--json", "--devices", f"{count}x{kind}"]
        arguments += [] if size is None else ["--memory-per-device", str(size)]
        planned = msgspec.structs.replace(self.config, base_model=str(self.model_dir), revision=None)
        arguments += as_words(planned, "plan")
        environment = of_worker(os.environ) | {"JAX_PLATFORMS": "cpu"}
        process = await asyncio.create_subprocess_exec(
            *tied([sys.executable, "-m", "spmd_tx.cli", "plan", *arguments]),
            env={name: value for name, value in environment.items() if not name.startswith("SPMD_TX_")},
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        said, complaints = await process.communicate()
        if process.returncode:
            lines = complaints.decode(errors="replace").strip().splitlines() or ["no plan was made"]
            raise StartError(lines[-1].removeprefix("spmd-tx: "))
        answer = msgspec.json.decode(said)
        fsdp, ep, tp = (answer[name] for name in PARALLEL_SIZES)
        return (fsdp, ep, tp), answer["why"]

    def _known(self) -> ChosenMesh | None:
        try:
            return msgspec.json.decode(self._record.read_bytes(), type=ChosenMesh)
        except (OSError, *UNREADABLE):
            return None

    def _note(self, mesh: tuple[int, int, int]) -> None:
        """Remember the mesh, and say when it is another one than at the last start."""
        known, record = self._known(), ChosenMesh(mesh, self.config.num_processes)
        if known == record:
            return
        if known is not None and known.mesh != mesh:
            logger.warning(
                "the mesh was fsdp %d x ep %d x tp %d at the last start and is fsdp %d x ep %d x tp %d now. "
                "Models continue, but what is run again may differ in the last bits",
                *(*known.mesh, *mesh),
            )
        try:
            make_folder(self._record.parent)
            write_file(self._record, msgspec.json.encode(record))
        except OSError as error:
            logger.warning("cannot remember the mesh in %s: %s", self._record, error.strerror)


def devices_of_each(config: ServerConfig, hosts: Sequence[HostDevices]) -> int:
    """Return how many devices each process has. Raises StartError unless all have the same number.

    CPUs are simulated: there are as many as the sizes that are given ask for, and one for each process.
    """
    wanted = [each.wanted or config.worker_devices for each in hosts]
    wanted = [count for count in wanted if count is not None]
    least = math.lcm(config.given_devices, config.num_processes)  # for the given sizes, and all processes
    simulated = wanted[0] if wanted else least // config.num_processes
    places = [(each.host, each.found.visible) for each in hosts]
    counts = [
        each.wanted
        or config.worker_devices
        or (simulated if each.found.kind == CPU else _part(each, places.count(place)))
        for each, place in zip(hosts, places, strict=True)
    ]
    if len(set(counts)) > 1:
        numbers = ", ".join(
            f"worker {process} on {each.host}: {count}"
            for process, (each, count) in enumerate(zip(hosts, counts, strict=True))
        )
        raise StartError(
            f"all processes must have the same number of devices, but they have {numbers}; "
            "give each spmd-tx worker the same --devices, or give all three parallel sizes"
        )
    return counts[0]


def _part(each: HostDevices, sharing: int) -> int:
    if each.found.count % sharing:
        raise StartError(
            f"{each.host} has {each.found.count} devices, which {sharing} processes cannot divide evenly; "
            "change --num-processes, or give all three parallel sizes"
        )
    return each.found.count // sharing


def _fits(config: ServerConfig, known: ChosenMesh, count: int) -> bool:
    """Whether a mesh has the sizes that are given, and all devices."""
    sizes = zip(config.parallel_sizes, known.mesh, strict=True)
    return math.prod(known.mesh) == count and all(given in (AUTO, size) for given, size in sizes)


def _completed(config: ServerConfig) -> tuple[int, int, int]:
    fsdp, ep, tp = (1 if size == AUTO else size for size in config.parallel_sizes)
    return fsdp, ep, tp
