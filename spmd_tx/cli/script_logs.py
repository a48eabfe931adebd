"""Finds the files into which a script logs its metrics, and reads them as they grow."""

import json
import math
import os
import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import psutil

JSON_LINES = "metrics.jsonl"  # of tinker-cookbook
BESIDE = ("logs.log", JSON_LINES)  # files that a recipe keeps open in the folder of its log
WANDB = ".wandb"
ARGUMENT = re.compile(r"-*(?:log_path|log-path|log_dir|log-dir)=(.+)")
STEP = ("step", "_step")
MOST_LEVELS, MOST_ENTRIES = 5, 5000  # of folders that are searched


class LoggedStep(NamedTuple):
    """Holds what a script has logged of one step, as it has written it."""

    step: int | None
    values: Mapping[str, object]

    def metrics(self) -> dict[str, float]:
        """Return the numbers among the values, those of inner tables with names like paths."""
        return dict(_numbers("", self.values))


class JsonLines:
    """Reads the lines that a file has got since the last look."""

    def __init__(self, path: Path, offset: int) -> None:
        self._path = path
        self._offset = offset

    def news(self) -> list[LoggedStep]:
        """Return what is new; an unfinished line is not yet. Raises OSError."""
        with self._path.open("rb") as file:
            file.seek(self._offset)
            lines = file.read().split(b"\n")[:-1]
        self._offset += sum(len(line) + 1 for line in lines)
        return [logged for line in lines if (logged := _of_line(line)) is not None]


def _of_line(line: bytes) -> LoggedStep | None:
    try:
        values = json.loads(line)
    except ValueError:
        return None
    if not isinstance(values, dict):
        return None
    step = next((values[name] for name in STEP if isinstance(values.get(name), int)), None)
    return LoggedStep(step, {name: value for name, value in values.items() if name not in STEP})


def _numbers(prefix: str, values: Mapping[str, object]) -> Iterable[tuple[str, float]]:
    for name, value in values.items():
        if isinstance(value, dict):
            yield from _numbers(f"{prefix}{name}/", value)
        elif isinstance(value, (int, float)) and not isinstance(value, bool) and not name.startswith("_"):
            try:
                if math.isfinite(value):
                    yield prefix + name, float(value)
            except OverflowError:
                pass


def named_folders(command: Iterable[str]) -> list[Path]:
    """Return the folders that a command line names for its log."""
    found = (ARGUMENT.fullmatch(argument) for argument in command)
    return [Path(match[1]).expanduser() for match in found if match is not None]


def logs_below(folder: Path) -> dict[Path, int]:
    """Return the logs in a folder and in those below it, with their bytes; of a large tree, those of its top.

    Hidden folders and links are left out.
    """
    found, level, looked_at = dict[Path, int](), [folder], 0
    for _ in range(MOST_LEVELS):
        below = list[Path]()
        for each in level:
            with suppress(OSError), os.scandir(each) as entries:
                for entry in islice(entries, max(0, MOST_ENTRIES - looked_at)):
                    looked_at += 1
                    path = Path(entry.path)
                    if entry.is_dir(follow_symlinks=False) and not entry.name.startswith("."):
                        below.append(path)
                    elif entry.is_file() and (entry.name == JSON_LINES or path.suffix == WANDB):
                        found[path] = entry.stat().st_size
        level = below
    return found


def open_logs(process: int) -> set[Path]:
    """Return the logs that a process and its children have open."""
    try:
        parent = psutil.Process(process)
        return _open_in([parent, *parent.children(recursive=True)])
    except psutil.NoSuchProcess:
        return set()


def logs_in_use() -> set[Path]:
    """Return the logs that any process of this user has open."""
    return _open_in(psutil.process_iter())


def _open_in(processes: Iterable[psutil.Process]) -> set[Path]:
    logs = set[Path]()
    for each in processes:
        with suppress(psutil.Error):  # it has ended, or is another user's
            for path in (Path(file.path) for file in each.open_files()):
                if path.name in BESIDE:
                    logs.add(path.with_name(JSON_LINES))
                elif path.suffix == WANDB:
                    logs.add(path)
    return logs
