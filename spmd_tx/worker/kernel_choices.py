"""Chooses among implementations what is right on this machine, once: by self-tests, whose outcomes are kept.

A restarted worker must choose the same even if a new test came out differently, because requests that it runs
again must give the same bits.
"""

import hashlib
import logging
import os
from collections.abc import Sequence
from contextlib import suppress
from importlib import metadata
from pathlib import Path

import jax
import msgspec
import numpy as np
from jax.experimental import multihost_utils

from spmd_tx.models.attention import packed_rows
from spmd_tx.models.attention.paged import attention as paged
from spmd_tx.models.experts import product
from spmd_tx.models.vision import attention as vision
from spmd_tx.protocol.kernels import Kernels, Platform, references
from spmd_tx.worker.decode_ways import WAYS
from spmd_tx.worker.self_tests.process import AnySizes, RunSelfTest
from spmd_tx.worker.self_tests.verdict import Verdict
from spmd_tx.worker.xla_flags import unknown_flags

# The implementations of each task, the fastest first.
ORDER = {
    "rows": list(packed_rows.IMPLEMENTATIONS),
    "pages": list(paged.IMPLEMENTATIONS),
    "products": list(product.IMPLEMENTATIONS),
    "decode": list(WAYS),
    "images": list(vision.IMPLEMENTATIONS),
}

log = logging.getLogger(__name__)


class Choice(msgspec.Struct, frozen=True):
    """Holds XLA flags, and the implementation that is right with them."""

    flags: list[str]
    implementation: str


def settle(folder: str, flags: Sequence[str], sizes: AnySizes, run: RunSelfTest) -> Choice:
    """Try everything once for this machine and these versions, and store the choice in the folder."""
    key = msgspec.json.encode([machine(), flags, os.environ.get("XLA_FLAGS", ""), sizes])
    kept = Path(folder) / f"kernel-{hashlib.sha256(key).hexdigest()[:16]}.json"
    if kept.exists():
        return msgspec.json.decode(kept.read_bytes(), type=Choice)
    known, verdicts = try_out(flags, sizes, run)
    for verdict in verdicts:
        if verdict.problem:
            log.warning("%s %r is not used: %s", sizes.what, verdict.implementation, verdict.problem)
    right = [verdict.implementation for verdict in verdicts if verdict.problem is None]
    if not right:
        return Choice(known, sizes.implementations[-1])
    choice = Choice(known, right[0])
    unfinished = kept.with_suffix(f".{os.getpid()}")  # other workers of this host may write the same
    try:
        kept.parent.mkdir(parents=True, exist_ok=True)
        unfinished.write_bytes(msgspec.json.encode(choice))
        unfinished.replace(kept)
    except OSError as error:  # of a host that may read only
        log.warning("cannot keep the choice of kernels in %s: %s", folder, error.strerror)
    return choice


def identity_of_choices(folder: Path) -> str:
    """Return a name for the choices of kernels that the folder holds; it lasts as long as they do."""
    file = folder / "identity"
    if not file.exists():
        folder.mkdir(parents=True, exist_ok=True)
        unfinished = folder / f"identity.{os.getpid()}"
        unfinished.write_text(os.urandom(4).hex())
        with suppress(FileExistsError):  # another process of this host was first
            os.link(unfinished, file)
        unfinished.unlink()
    return file.read_text()


def machine() -> list[str]:
    """List versions, driver, GPUs and the kind of TPUs, without opening them."""
    driver = Path("/proc/driver/nvidia")
    files = [driver / "version", *sorted(driver.glob("gpus/*/information"))]
    lines = [line for file in files if file.exists() for line in file.read_text().splitlines()]
    facts = [line for line in lines if line.startswith(("NVRM", "Model"))]
    facts.append(os.environ.get("TPU_ACCELERATOR_TYPE", ""))
    names = ("jax", "nvidia", "libtpu")
    libraries = [library for library in metadata.distributions() if library.name.startswith(names)]
    return [*facts, *sorted(f"{library.name} {library.version}" for library in libraries)]


def agreed(kernels: Kernels, platform: Platform) -> Kernels:
    """Return, of each choice, the slowest that a process has made: the programs of all must be the same.

    What was chosen for another platform than that of the devices that JAX has opened does not count.
    """
    if kernels.platform != platform:
        kernels = references(platform)
    if jax.process_count() == 1:
        return kernels
    positions = [names.index(getattr(kernels, task)) for task, names in ORDER.items()]
    slowest = multihost_utils.process_allgather(np.array(positions, np.int32)).max(axis=0)
    names = {task: names[number] for (task, names), number in zip(ORDER.items(), slowest, strict=True)}
    return msgspec.structs.replace(kernels, **names)


def try_out(flags: Sequence[str], sizes: AnySizes, run: RunSelfTest) -> tuple[list[str], list[Verdict]]:
    """Return the flags that XLA knows, and verdicts on the implementations up to the first correct one.

    If even the reference fails, the flags are to blame, and none is returned.
    """
    flags, waiting, verdicts = list(flags), list(sizes.implementations), []
    while waiting:
        ended = run(flags, msgspec.structs.replace(sizes, implementations=waiting))
        if unknown := [flag for flag in flags if flag.split("=")[0] in unknown_flags(ended.errors)]:
            log.warning("XLA does not know %s", " ".join(unknown))
            flags = [flag for flag in flags if flag not in unknown]
            continue
        tried = {verdict.implementation: verdict for verdict in ended.verdicts}
        for name in list(waiting):
            verdict = tried.get(name) or Verdict(name, ended.why)
            verdicts.append(verdict)
            waiting.remove(name)
            if verdict.problem is None:
                return flags, verdicts
            if name not in tried:
                break  # it ended the process, so the others have not been tried
    if flags:
        log.warning("no %s is right with the XLA flags %s, so they are not set", sizes.what, " ".join(flags))
    return [], verdicts
