"""Reads what the fields of an adapter_config.json say of ranks and scales, as PEFT means them. No JAX."""

import re
from collections.abc import Mapping
from typing import TypeVar

import msgspec

from spmd_tx.errors import InvalidRequest
from spmd_tx.models.adapter_formats.files import PREFIX, alpha_of

PATTERN = re.compile(r"\^?(\w|-|\\?\.|\\d\+)+\$?")
NUMBER = re.compile(r"\b\d+\b")
LEAST, MOST = 1e-9, 1e9  # of ranks and alphas, so that no scale overflows
SHOWN = 200  # characters of a pattern


class Meaning(msgspec.Struct):
    """Reads the fields of adapter_config.json that say what a file's factors mean."""

    r: int
    lora_alpha: float
    use_rslora: bool | None = False
    rank_pattern: dict[str, int] | None = None
    alpha_pattern: dict[str, float] | None = None
    target_parameters: list[str] | None = None

    def check(self) -> None:
        """Raise InvalidRequest for values that no adapter has, and for patterns that are not read."""
        values: dict[str, float] = {"r": self.r, "lora_alpha": self.lora_alpha}
        values |= {
            f"rank_pattern of {key[:SHOWN]}": value for key, value in (self.rank_pattern or {}).items()
        }
        values |= {
            f"alpha_pattern of {key[:SHOWN]}": value for key, value in (self.alpha_pattern or {}).items()
        }
        for name, value in values.items():
            if not LEAST <= value <= MOST:
                raise InvalidRequest(f"{name} is {value}; it must be positive, and at most {MOST:g}")
        for key in {**(self.rank_pattern or {}), **(self.alpha_pattern or {})}:
            if not PATTERN.fullmatch(key):
                raise InvalidRequest(
                    f"the pattern {key[:SHOWN]!r} is not read; name modules, with \\d+ for their numbers"
                )


class Scales:
    """Tells the rank and the scale of each module of a file, as PEFT finds them.

    A pattern holds for the modules whose names end in it, the first of several. Patterns are of clients, so
    no regular expression is made of them, and a module looks up its own endings.
    """

    def __init__(self, meaning: Meaning) -> None:
        """``meaning`` has been checked."""
        self._meaning = meaning
        self._ranks, self._alphas = _by_ending(meaning.rank_pattern), _by_ending(meaning.alpha_pattern)

    def rank(self, module: str) -> int:
        return _first(self._ranks, module, self._meaning.r)

    def scale(self, module: str) -> float:
        """What the product of a module's factors is multiplied by."""
        alpha, rank = _first(self._alphas, module, self._meaning.lora_alpha), self.rank(module)
        return alpha_of(alpha, rank, bool(self._meaning.use_rslora)) / rank


Number = TypeVar("Number", int, float)
ByEnding = dict[str, tuple[int, Number]]  # the place of a pattern among all, and its value


def _by_ending(patterns: Mapping[str, Number] | None) -> ByEnding[Number]:
    found: ByEnding[Number] = {}
    for place, (pattern, value) in enumerate((patterns or {}).items()):
        ending = pattern.removeprefix("^").removesuffix("$").replace("\\.", ".").removeprefix(PREFIX)
        found.setdefault(ending, (place, value))
    return found


def _first(patterns: ByEnding[Number], module: str, default: Number) -> Number:
    if not patterns:
        return default
    parts = module.split(".")
    endings = [".".join(parts[first:]) for first in range(len(parts))]
    endings += [NUMBER.sub(r"\\d+", ending) for ending in endings]
    found = [patterns[ending] for ending in endings if ending in patterns]
    return min(found)[1] if found else default
