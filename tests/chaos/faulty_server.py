"""Runs ``spmd-tx serve`` or ``spmd-tx worker`` with named points (points.py) around what they do."""

import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2]))

from spmd_tx.cli import main as cli
from spmd_tx.coordinator.agent import main
from spmd_tx.coordinator.checkpoints.catalog import CheckpointCatalog
from spmd_tx.coordinator.checkpoints.snapshots import Snapshots
from spmd_tx.coordinator.checkpoints.writes import Writes
from spmd_tx.coordinator.images.prepared import PreparedImages
from spmd_tx.coordinator.mesh.hub import Hub
from spmd_tx.coordinator.requests.group_writer import Submission
from spmd_tx.coordinator.requests.payload_files import PayloadFiles
from spmd_tx.coordinator.requests.queue import RequestQueue
from spmd_tx.coordinator.sampling.speculation.guess import Guess
from spmd_tx.coordinator.server import serve
from tests.chaos.points import wrap

WORKER = str(Path(__file__).with_name("faulty_worker.py"))


def put_in_points() -> None:
    """Put points into the coordinator."""
    wrap(RequestQueue, "_write", "row", counts=lambda _, submissions, outcomes: bool(submissions))
    wrap(RequestQueue, "_write", "result", counts=lambda _, submissions, outcomes: bool(outcomes))
    wrap(PayloadFiles, "write", "payload")
    wrap(Hub, "send", "command")
    wrap(CheckpointCatalog, "complete", "checkpoint")
    wrap(Snapshots, "record", "snapshot")
    wrap(Writes, "take", "written")
    wrap(RequestQueue, "_write", "image_row", _have_images)
    wrap(PreparedImages, "_prepare", "image")
    wrap(Hub, "send", "image_command", lambda _, command, *__: command.name == "encode_images")
    wrap(Guess, "note", "draft", _was_right)


def _have_images(_: RequestQueue, submissions: Sequence[Submission], __: object) -> bool:
    return any(submission.images for submission in submissions)


def _was_right(_: Guess, tokens_KF: np.ndarray) -> bool:
    return bool((tokens_KF[:, 1:] >= 0).any())


if __name__ == "__main__":
    put_in_points()
    serve.serve.__defaults__ = ((WORKER,),)
    main.run = partial(main.run, worker=(WORKER,))
    sys.argv[0] = "spmd-tx"
    cli.main()
