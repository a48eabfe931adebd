"""Loads a file of the user's that says what to ask, and how good an answer is."""

import importlib.util
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from spmd_tx.errors import StartError
from spmd_tx.train.rows import RowMessage

EXAMPLE = 'PROMPTS = ["What is 2 + 3?"]; def reward(prompt, answer): return float("5" in answer)'


@dataclass(frozen=True)
class RewardEnvironment:
    """Prompts, and what an answer to one is worth."""

    prompts: Sequence[Any]
    held_out: Sequence[Any]
    reward: Callable[[Any, str], float]


def load(path: Path) -> RewardEnvironment:
    """Import the file. Raises StartError for what is missing in it, and for what it raises."""
    spec = importlib.util.spec_from_file_location("spmd_tx_environment", path)
    if not path.is_file() or spec is None or spec.loader is None:
        raise StartError(f"{path} is no Python file; write one such as: {EXAMPLE}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    sys.path.insert(0, str(path.parent))  # as for a script
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as problem:
        raise StartError(f"{path} cannot be imported: {type(problem).__name__}: {problem}") from problem
    reward = getattr(module, "reward", None)
    if not callable(reward):
        raise StartError(f"{path} has no function reward(prompt, answer); write it such as: {EXAMPLE}")
    prompts = list(getattr(module, "PROMPTS", []))
    if not prompts:
        raise StartError(f"{path} has no PROMPTS; write them such as: {EXAMPLE}")
    held_out = list(getattr(module, "EVAL_PROMPTS", []))
    for place, prompt in enumerate([*prompts, *held_out]):
        _check(messages(prompt), f"prompt {place} of {path}")
    return RewardEnvironment(prompts, held_out, cast(Callable[[Any, str], float], reward))


def messages(prompt: Any) -> list[RowMessage]:
    """Return the conversation of a prompt: a string, messages, or a mapping with either as its "prompt"."""
    if isinstance(prompt, dict):
        prompt = prompt.get("prompt")
    return [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt


def _check(conversation: Any, place: str) -> None:
    if not isinstance(conversation, list) or not all(
        isinstance(message, dict) and isinstance(message.get("role"), str) for message in conversation
    ):
        raise StartError(
            f"{place} is {str(conversation)[:60]!r}; it must be a string, a list of messages, "
            'or a dict whose "prompt" is one of these'
        )
