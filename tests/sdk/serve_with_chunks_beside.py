"""Runs ``spmd-tx serve`` with a coordinator that predicts of chunks beside decodes what is true on GPUs."""

import sys
from typing import Any

from spmd_tx.cli import main as cli
from spmd_tx.coordinator.sampling import programs

if __name__ == "__main__":

    def saves_time(*_: Any) -> bool:
        return True

    programs.saves_time = saves_time
    sys.argv[0] = "spmd-tx"
    cli.main()
