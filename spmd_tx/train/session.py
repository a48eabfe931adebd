"""Connects to a server, and begins a run or goes on with one."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from spmd_tx.errors import StartError
from spmd_tx.train.folder import RunFolder
from spmd_tx.train.optimizers import TrainOptimizer


def choose_model(base_model: str | None, served: list[str]) -> str:
    """Return the model to train: the one that is named, or the only one. Raises StartError."""
    if base_model is None and len(served) == 1:
        return served[0]
    if base_model in served:
        return base_model
    said = "is not given" if base_model is None else f"is {base_model}"
    raise StartError(f"--base-model {said}; the server has {', '.join(served)}")


@dataclass(frozen=True)
class Beginning:
    """What a run starts from."""

    base_model: str
    rank: int  # 0 trains all weights
    seed: int
    state: str | None  # path of a checkpoint whose weights to begin with
    optimizer: TrainOptimizer


class TrainSession:
    """One client's session with a server."""

    def __init__(self, url: str, api_key: str) -> None:
        import tinker

        self._url, self._api_key = url, api_key
        self._service = tinker.ServiceClient(base_url=url, api_key=api_key)

    def trainer(self, beginning: Beginning, folder: RunFolder, metadata: Mapping[str, str]) -> Any:
        """Return the client of a new run, or of one that goes on where the folder says."""
        if folder.place.state is not None:
            return self._service.create_training_client_from_state_with_optimizer(
                folder.place.state, user_metadata=dict(metadata)
            ).result()
        if beginning.state is not None:
            return self._service.create_training_client_from_state(
                beginning.state, user_metadata=dict(metadata), optimizer=beginning.optimizer.config
            ).result()
        return self._service.create_lora_training_client(
            beginning.base_model,
            rank=beginning.rank,
            seed=beginning.seed,
            user_metadata=dict(metadata),
            optimizer=beginning.optimizer.config,
        ).result()

    def forget(self, path: str) -> None:
        """Delete a checkpoint that nobody needs any more."""
        import tinker

        tinker.RestClient(base_url=self._url, api_key=self._api_key).delete_checkpoint_from_tinker_path(
            path
        ).result()

    def close(self, status: Literal["success", "errored", "interrupted"], detail: str | None = None) -> None:
        """Tell the server how the run has ended."""
        self._service.close(status, detail).result()
