"""Runs programs of the SDK in processes of their own."""

import os
import runpy
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from tests.support.forked import Forked

SECONDS = 280  # until a process must have ended


def run_python(script: Path, *arguments: object, **environment: str) -> str:
    """Run ``python SCRIPT ARGUMENTS`` with more variables; returns what it prints."""
    return _run_forked(_run_script, script, *arguments, **environment)


def run_tinker(*arguments: object, **environment: str) -> str:
    """Run ``tinker ARGUMENTS``, apart because the SDK keeps to the first key that a process has seen."""
    return _run_forked(_run_tinker, *arguments, **environment)


def run_tinker_anew(*arguments: object, answer: str = "", **environment: str) -> str:
    """Do the same in a new interpreter, with variables that imports read, or an answer to what it asks."""
    ended = subprocess.run(
        [sys.executable, "-m", "tinker.cli", *map(str, arguments)],
        input=answer,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    return _checked(ended.returncode, ended.stdout, ended.stderr)


def _run_forked(run: Callable[..., None], *arguments: object, **environment: str) -> str:
    with Forked(run, *map(str, arguments), environment=os.environ | environment) as process:
        printed, errors = process.communicate(SECONDS)
        return _checked(process.wait(), printed, errors)


def _checked(code: int, printed: str, errors: str) -> str:
    # A thread of the SDK sometimes aborts the interpreter at its end, when all is done and said.
    assert code in (0, -signal.SIGABRT), printed + errors
    assert not errors.startswith("Error"), errors
    return printed


def _run_script(script: str, *arguments: str) -> None:
    sys.argv[:] = [script, *arguments]
    sys.path.insert(0, str(Path(script).parent))
    runpy.run_path(script, run_name="__main__")


def _run_tinker(*arguments: str) -> None:
    from tinker.cli.__main__ import cli

    sys.argv[:] = ["tinker", *arguments]
    cli()
