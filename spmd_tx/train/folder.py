"""Keeps a run's settings, place and metrics in a folder, so that the same command goes on after any end."""

import hashlib
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from spmd_tx import durable_files
from spmd_tx.errors import UNREADABLE, StartError


class RunPlace(msgspec.Struct):
    """Where a run is: after so many steps, its weights and optimizer are in a checkpoint."""

    settings: dict[str, Any]  # what decides the run's numbers
    step: int = 0
    state: str | None = None  # path of the checkpoint, tinker://...
    final: str | None = None  # path of the weights to sample from, once the run has ended


class RunFolder:
    """One run's folder: ``place.json``, ``metrics.jsonl``, and what a kind of training adds."""

    def __init__(self, path: Path, settings: Mapping[str, Any]) -> None:
        """Open a folder. Raises StartError if another run is in it."""
        self.path = path
        try:
            durable_files.make_folder(path)
            self.place = self._read(dict(settings))
        except OSError as problem:
            raise StartError(f"--out is {path}, which cannot be used: {problem.strerror}") from None
        self.metrics = [each for each in self._metrics() if each["step"] < self.place.step]
        log = path / "metrics.jsonl"
        durable_files.write_file(log, b"".join(map(_line, self.metrics)))
        # Open until the process ends: so others know whose it is, as spmd-tx watch does.
        self._log = os.open(log, os.O_WRONLY | os.O_APPEND)

    def add_metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        """Add a step's metrics to the file."""
        entry = {"step": step, **metrics}
        self.metrics.append(entry)
        os.write(self._log, _line(entry))

    def save(self, step: int, state: str | None, final: str | None = None) -> None:
        """Note durably that the run has come so far."""
        self.place.step, self.place.state, self.place.final = step, state, final
        durable_files.write_file(self.path / "place.json", _line(self.place))

    def curve(self, name: str) -> list[float]:
        """Return the values of a metric, in the order of their steps, without those that are not finite."""
        values = [entry[name] for entry in self.metrics if entry.get(name) is not None]
        return [value for value in values if math.isfinite(value)]

    def _read(self, settings: dict[str, Any]) -> RunPlace:
        path = self.path / "place.json"
        if not path.exists():
            return RunPlace(settings)
        try:
            place = msgspec.json.decode(path.read_bytes(), type=RunPlace)
        except UNREADABLE as problem:
            raise StartError(f"{path} is damaged: {problem}; name another --out") from None
        for name, value in settings.items():
            was = place.settings.get(name)
            if was != value:
                raise StartError(
                    f"the run in {self.path} was begun with {name} {was!r}, and this command says {value!r}; "
                    "say the same to go on with it, or name another --out"
                )
        return place

    def _metrics(self) -> list[dict[str, Any]]:
        path = self.path / "metrics.jsonl"
        lines = path.read_bytes().splitlines() if path.exists() else []
        found: list[dict[str, Any]] = []
        for line in lines:
            try:
                found.append(msgspec.json.decode(line))
            except UNREADABLE:  # cut short by the end of the process
                break
        return found


def digest(path: Path) -> str:
    """Return a digest of a file's bytes, by which a changed file is known. Raises StartError."""
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()[:16]
    except OSError as problem:
        raise StartError(f"cannot read {path}: {problem.strerror}") from None


def _line(value: object) -> bytes:
    return msgspec.json.encode(value) + b"\n"
