"""Program orders for samplers of tests: all programs are ready."""

from collections.abc import Iterable

from spmd_tx.coordinator.mesh.program_orders import ProgramOrders
from spmd_tx.protocol.programs import ProgramShape


class EverythingReady(ProgramOrders):
    """Program orders of workers that compile nothing."""

    def __init__(self) -> None:
        super().__init__(menu=())

    def is_ready(self, program: ProgramShape) -> bool:
        return True

    def ready(self, step: str) -> Iterable[ProgramShape]:
        return ()

    def has_failed(self, program: ProgramShape) -> bool:
        return False

    def prefer(self, program: ProgramShape) -> None:
        """Do nothing: no program is better than another."""

    def reason(self, program: ProgramShape) -> str:
        raise AssertionError(f"nobody waits for {program}")
