"""Starts the process that compiles ahead of need at the usual priority, so that tests do not wait."""

import sys

from spmd_tx.worker.programs.aside_process import main

if __name__ == "__main__":
    main(int(sys.argv[1]))
