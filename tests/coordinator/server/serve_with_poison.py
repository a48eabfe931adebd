"""serve_with_fake_workers.py, but that optimizer steps with some learning rates end the coordinator."""

import os
import runpy
import time
from pathlib import Path

from spmd_tx.coordinator.training import execute, optimizers

EXIT, FREEZE = 0.125, 0.5  # learning rates

original = optimizers.step_of


def step_of(wish, adapter, *, is_again):
    if not is_again and wish.adam_params.learning_rate == EXIT:
        os._exit(3)
    while not is_again and wish.adam_params.learning_rate == FREEZE:
        time.sleep(0.01)
    return original(wish, adapter, is_again=is_again)


if __name__ == "__main__":
    execute.step_of = step_of
    runpy.run_path(str(Path(__file__).with_name("serve_with_fake_workers.py")), run_name="__main__")
