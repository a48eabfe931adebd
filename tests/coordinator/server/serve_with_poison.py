"""serve_with_fake_workers.py, but that optimizer steps with some learning rates end the coordinator."""

import os
import runpy
import time
from pathlib import Path

from spmd_tx.coordinator.training import execute, validation

EXIT, FREEZE = 0.125, 0.5  # learning rates

original = validation.check_adam


def check_adam(wish):
    if wish.adam_params.learning_rate == EXIT:
        os._exit(3)
    while wish.adam_params.learning_rate == FREEZE:
        time.sleep(0.01)
    return original(wish)


if __name__ == "__main__":
    execute.check_adam = check_adam
    runpy.run_path(str(Path(__file__).with_name("serve_with_fake_workers.py")), run_name="__main__")
