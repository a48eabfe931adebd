"""Makes ``python -m spmd_tx.cli`` the command ``spmd-tx``."""

from spmd_tx.cli.main import main

main()
