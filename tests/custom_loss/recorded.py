"""Losses that write_recorded.py has run with torch."""

import gzip
import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np

RECORDED = Path(__file__).parent / "recorded.json.gz"


@dataclass(frozen=True)
class Recorded:
    """One loss: what the SDK uploads, datums, and torch's results for each of them."""

    definition: dict
    data: list[dict[str, np.ndarray]]
    losses: np.ndarray  # [D]
    metrics: list[dict[str, float]]
    gradients: list[np.ndarray]  # with respect to logprobs

    @property
    def body(self) -> bytes:
        return json.dumps(self.definition).encode()


@cache
def recorded() -> dict[str, Recorded]:
    with gzip.open(RECORDED) as file:
        cases = json.load(file)
    return {name: _recorded(case) for name, case in cases.items()}


def losses() -> list[str]:
    return [name for name in recorded() if not name.startswith("operations: ")]


def operations() -> list[str]:
    return [name for name in recorded() if name.startswith("operations: ")]


def _recorded(case: dict) -> Recorded:
    integers = case["integers"]
    return Recorded(
        definition=case["definition"],
        data=[
            {
                key: np.array(value, np.int64 if key in integers else np.float32)
                for key, value in datum.items()
            }
            for datum in case["data"]
        ],
        losses=np.array(case["losses"]),
        metrics=case["metrics"],
        gradients=[np.array(gradient, np.float32) for gradient in case["gradients"]],
    )
