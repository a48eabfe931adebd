"""Sets up the log of the coordinator and of agents: a line per event, on standard error."""

import logging


def log_to_stderr() -> None:
    logging.basicConfig(
        format="%(asctime)s %(levelname)s %(message)s", datefmt="%H:%M:%S", level=logging.WARNING
    )
    logging.getLogger("spmd_tx").setLevel(logging.INFO)
