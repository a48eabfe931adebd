"""The parts that drive one generation of workers, and what it leaves behind."""

from dataclasses import dataclass
from typing import NamedTuple

from spmd_tx.coordinator.grammar.compiler import Grammars
from spmd_tx.coordinator.mesh.compilation import Compilation
from spmd_tx.coordinator.mesh.hub import Hub
from spmd_tx.coordinator.sampling.batch import SampleBatch
from spmd_tx.coordinator.sampling.versions import Versions
from spmd_tx.coordinator.training.execute import Training


@dataclass(frozen=True)
class GenerationParts:
    """Holds the parts that are made anew for each generation."""

    workers: Hub
    training: Training
    versions: Versions
    sampling: SampleBatch
    compilation: Compilation
    trains: bool = True  # whether the workers train, or only sample
    grammars: Grammars | None = None  # None: no request has one


class GenerationEnd(NamedTuple):
    """Says which requests a lost generation was at work on."""

    in_flight: frozenset[str] | set[str] = frozenset()  # requests whose commands were out
    blamed: frozenset[str] | set[str] = frozenset()  # those whose command may have ended the generation
