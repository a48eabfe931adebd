"""Starts the process that compiles ahead of need, at the lowest priority before libraries start threads."""

import sys

from spmd_tx.processes.modest import be_idle
from spmd_tx.processes.parent import end_with

if __name__ == "__main__":
    end_with(int(sys.argv[2]))
    be_idle()
    from spmd_tx.worker.programs.aside_process import main

    main(int(sys.argv[1]))
