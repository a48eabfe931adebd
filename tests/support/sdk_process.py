"""Runs programs of the SDK in processes of their own."""

import os
import signal
import subprocess
import sys

SECONDS = 280  # until a process must have ended


def run_python(*arguments: object, answer: str = "", **environment: str) -> str:
    """Run ``python ARGUMENTS`` with more variables and an answer to what it asks; returns what it prints."""
    command = [sys.executable, *map(str, arguments)]
    ended = subprocess.run(
        command,
        input=answer,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    # A thread of the SDK sometimes aborts the interpreter at its end, when all is done and said.
    assert ended.returncode in (0, -signal.SIGABRT), ended.stdout + ended.stderr
    assert not ended.stderr.startswith("Error"), ended.stderr
    return ended.stdout


def run_tinker(*arguments: object, answer: str = "", **environment: str) -> str:
    """Run ``tinker ARGUMENTS``, apart because the SDK keeps to the first key that a process has seen."""
    return run_python("-m", "tinker.cli", *arguments, answer=answer, **environment)
