"""Runs recipes of tinker-cookbook as a user would, and keeps what they gave for the report."""

import json
import os
import re
import subprocess
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from spmd_tx.demo.run import ServerLog

HERE = Path(__file__).parent
ENVIRONMENT = HERE.parents[1] / ".venv-cookbook"
PYTHON = str(ENVIRONMENT / "bin" / "python")
EXPECTED_WARNINGS = ("there are no API keys",)

Step = dict[str, Any]  # what a recipe logs of one step


@dataclass(frozen=True)
class Served:
    """A running server; ``model`` is the name of its base model. "": recipes keep the names they have."""

    url: str
    model: str
    log: ServerLog

    def complaints(self) -> list[str]:
        """What is in its log and is no good news."""
        bad = [line for line in self.log.lines() if any(w in line for w in ("WARNING", "ERROR", "Traceback"))]
        return [line for line in bad if not any(expected in line for expected in EXPECTED_WARNINGS)]


@dataclass
class Run:
    """A recipe that has ended well, or was killed, and the files it wrote."""

    folder: Path
    output: str = ""

    @property
    def steps(self) -> list[Step]:
        return read_json_lines(self.folder / "metrics.jsonl")

    @property
    def checkpoints(self) -> list[dict]:
        return read_json_lines(self.folder / "checkpoints.jsonl")

    def values(self, name: str) -> list[Any]:
        """A metric of the steps that have it."""
        return [step[name] for step in self.steps if name in step]


@dataclass(frozen=True)
class Row:
    """A line of the report."""

    command: str
    gave: str
    seconds: float


@dataclass
class Cookbook:
    """The recipes, against one server. Runs go to folders under ``folder``."""

    server: Served
    environment: dict[str, str]
    folder: Path
    rows: list[Row]
    _last: tuple[str, float] = field(default=("", 0.0))  # command and seconds

    def command(self, program: str, name: str, options: dict[str, Any]) -> list[str]:
        """``program`` is a recipe's module below tinker_cookbook.recipes, or one of our scripts."""
        log = {} if "experiment_dir" in options else {"log_path": self.folder / name}
        values = self._model() | options | log
        arguments = [f"{key}={value}" for key, value in values.items()]
        script = (
            [str(HERE / program)] if program.endswith(".py") else ["-m", f"tinker_cookbook.recipes.{program}"]
        )
        return [PYTHON, *script, *arguments]

    def _model(self) -> dict[str, Any]:
        return {"model_name": self.server.model} if self.server.model else {}

    def run(self, program: str, name: str = "log", **options: Any) -> Run:
        """Run a recipe to its end. A keyword ``a__b`` is the option ``a.b``."""
        options = {key.replace("__", "."): value for key, value in options.items()}
        started = time.monotonic()
        output = run_python(self.environment, self.command(program, name, options))
        shown = [f"{key}={value}" for key, value in (self._model() | options).items()]
        self._last = (" ".join([program, *shown]), time.monotonic() - started)
        return Run(self.folder / name, output)

    def start(self, program: str, name: str, **options: Any) -> subprocess.Popen[bytes]:
        """Start a recipe that the test will kill."""
        with (self.folder / f"{name}.out").open("w") as file:
            return subprocess.Popen(
                self.command(program, name, options), env=self.environment, stdout=file, stderr=file
            )

    def report(self, gave: str) -> None:
        """Note in words what the last run gave."""
        command, seconds = self._last
        command = re.sub(r"tinker://[^/]+", "tinker://…", command).replace(f"{self.folder}/", "")
        self.rows.append(Row(command, gave, seconds))
        print(f"{command}: {gave} ({seconds:.0f} s)")


def run_python(environment: dict[str, str], command: list[str]) -> str:
    finished = subprocess.run(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    assert finished.returncode == 0, f"{' '.join(command)}\n{finished.stdout[-8000:]}"
    return finished.stdout


def offline_environment(hub: Path) -> dict[str, str]:
    offline = {"HF_HOME": str(hub), "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
    return {**os.environ, **offline, "TOKENIZERS_PARALLELISM": "false", "TINKER_API_KEY": "tml-cookbook"}


def read_json_lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def mean(values: list[float]) -> float:
    return sum(values) / len(values)
