"""serve_with_fake_workers.py, but that optimizer steps with some learning rates end the coordinator."""

import os
import time

from spmd_tx.coordinator.training import execute, optimizers
from tests.coordinator.server import serve_with_fake_workers

EXIT, FREEZE = 0.125, 0.5  # learning rates

original = optimizers.step_of


def step_of(wish, adapter, *, is_again):
    if not is_again and wish.adam_params.learning_rate == EXIT:
        os._exit(3)
    while not is_again and wish.adam_params.learning_rate == FREEZE:
        time.sleep(0.01)
    return original(wish, adapter, is_again=is_again)


def main(options):
    execute.step_of = step_of
    serve_with_fake_workers.main(options)
