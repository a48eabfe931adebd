"""Connects to a server, and begins a run or goes on with one."""

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from spmd_tx.errors import StartError
from spmd_tx.train.folder import RunFolder
from spmd_tx.train.optimizers import TrainOptimizer

NOBODY = "tml-local"  # the SDK wants a key, also for a server that has none
CLOSE_SECONDS = 30.0  # the SDK waits for its other threads without a limit


def choose_model(base_model: str | None, served: list[str]) -> str:
    """Return the model to train: the one that is named, or the only one. Raises StartError."""
    if base_model is None and len(served) == 1:
        return served[0]
    if base_model in served:
        return base_model
    said = "is not given" if base_model is None else f"is {base_model}"
    raise StartError(f"--base-model {said}; the server has {', '.join(served)}")


@dataclass(frozen=True)
class Job:
    """What all kinds of training are told alike."""

    url: str
    api_key: str  # empty: the server has none
    base_model: str | None
    start: str | None  # path of a checkpoint whose weights to begin with
    rank: int  # 0 trains all weights
    seed: int
    out: Path


class TrainSession:
    """One client's session with a server."""

    def __init__(self, job: Job) -> None:
        import tinker

        self._job = job
        self._server: dict[str, Any] = {"base_url": job.url, "api_key": job.api_key or NOBODY}
        self._service = tinker.ServiceClient(**self._server)

    def trainer(self, model: str, optimizer: TrainOptimizer, folder: RunFolder) -> Any:
        """Return the client of a new run, or of one that goes on where the folder says."""
        job, service = self._job, self._service
        told: dict[str, Any] = {"user_metadata": {"name": str(job.out)}}
        if folder.place.state is not None:
            begun = service.create_training_client_from_state_with_optimizer(folder.place.state, **told)
        elif job.start is not None:
            begun = service.create_training_client_from_state(job.start, optimizer=optimizer.config, **told)
        else:
            begun = service.create_lora_training_client(
                model, rank=job.rank, seed=job.seed, optimizer=optimizer.config, **told
            )
        return begun.result()

    def forget(self, path: str) -> None:
        """Delete a checkpoint that nobody needs any more."""
        import tinker

        tinker.RestClient(**self._server).delete_checkpoint_from_tinker_path(path).result()

    def close(self, status: Literal["success", "errored", "interrupted"], detail: str | None = None) -> None:
        """Tell the server how the run has ended, if it can be told in time."""
        with suppress(TimeoutError):
            self._service.close(status, detail).result(CLOSE_SECONDS)
