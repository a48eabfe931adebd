"""Reads an adapter_config.json as PEFT means it: ranks, scales, and the modules that have factors. No JAX."""

import re
from collections.abc import Mapping
from functools import cached_property
from typing import Generic, TypeVar

import msgspec

from spmd_tx.errors import UNREADABLE, InvalidRequest
from spmd_tx.models.adapter_formats.files import alpha_of
from spmd_tx.models.adapter_formats.patterns import SHOWN, Pattern
from spmd_tx.models.adapter_formats.peft_fields import check_fields
from spmd_tx.models.adapter_formats.selection import Selection, endings

# Patterns that a module finds by its own endings, with all numbers in one spelling.
NAMED = re.compile(r"(\w|-|\\?\.)+\$?")
PART = r"(?:(?:[^\W\d]|-)+|\\d\+)"
NUMBERED = re.compile(rf"{PART}(\\?\.{PART})*\$?")
NUMBER = re.compile(r"\b\d+\b")
LEAST, MOST = 1e-9, 1e9  # of ranks and alphas, so that no scale overflows
MOST_PATTERNS = 64  # that are tried with each module


class Meaning(msgspec.Struct, dict=True):
    """Holds the fields of adapter_config.json that say what a file's factors mean."""

    r: int
    lora_alpha: float
    base_model_name_or_path: str | None = None
    use_rslora: bool | None = False
    rank_pattern: dict[str, int] | None = None
    alpha_pattern: dict[str, float] | None = None
    target_modules: list[str] | str | None = None
    target_parameters: list[str] | None = None
    exclude_modules: list[str] | str | None = None
    layers_to_transform: list[int] | int | None = None
    layers_pattern: list[str] | str | None = None

    def check(self) -> None:
        """Raise InvalidRequest for values that no adapter has, and for patterns that are not read."""
        values: dict[str, float] = {"r": self.r, "lora_alpha": self.lora_alpha}
        for field in ("rank_pattern", "alpha_pattern"):
            patterns: dict[str, float] = getattr(self, field) or {}
            values |= {f"{field} of {key[:SHOWN]}": value for key, value in patterns.items()}
        for name, value in values.items():
            if not LEAST <= value <= MOST:
                raise InvalidRequest(f"{name} is {value}; it must be positive, and at most {MOST:g}")
        _ = self.scales, self.selection

    @cached_property
    def scales(self) -> "Scales":
        return Scales(self)

    @cached_property
    def selection(self) -> Selection:
        return Selection(
            self.target_modules,
            self.target_parameters,
            self.exclude_modules,
            self.layers_to_transform,
            self.layers_pattern,
        )

    @property
    def alpha(self) -> float:
        """The alpha of modules that no pattern names, where alpha / r is the scale."""
        return alpha_of(self.lora_alpha, self.r, bool(self.use_rslora))


def read_meaning(content: bytes, file: object) -> Meaning:
    """Return what an adapter_config.json says; ``file`` is for messages.

    Raises InvalidRequest where it cannot be read, or where the factors are no plain LoRA.
    """
    try:
        fields = msgspec.json.decode(content, type=dict[str, object])
        check_fields(fields, file)
        meaning = msgspec.json.decode(content, type=Meaning)
    except (*UNREADABLE, RecursionError) as problem:
        raise InvalidRequest(f"{file} cannot be read, or is damaged: {problem}") from None
    meaning.check()
    return meaning


class Scales:
    """Tells the rank and the scale of each module of a file, as PEFT finds them.

    A pattern holds for the modules whose names end in it, the first of several. Most patterns are names, with
    which each module is looked up; there may be as many of them as modules.
    """

    def __init__(self, meaning: Meaning) -> None:
        """Raise InvalidRequest for patterns that are not read."""
        self._meaning = meaning
        self._ranks, self._alphas = _Patterns(meaning.rank_pattern), _Patterns(meaning.alpha_pattern)

    def rank(self, *names: str) -> int:
        """Return the rank of a module, which may have several names."""
        return self._ranks.first(names, self._meaning.r)

    def scale(self, *names: str) -> float:
        """Return what the product of a module's factors is multiplied by."""
        alpha, rank = self._alphas.first(names, self._meaning.lora_alpha), self.rank(*names)
        return alpha_of(alpha, rank, bool(self._meaning.use_rslora)) / rank


PatternValue = TypeVar("PatternValue", int, float)


class _Patterns(Generic[PatternValue]):
    """Holds the values of patterns."""

    def __init__(self, patterns: Mapping[str, PatternValue] | None) -> None:
        self._named: dict[str, tuple[int, PatternValue]] = {}  # by ending: the place among all, and the value
        self._others: list[tuple[int, Pattern, PatternValue]] = []
        self._values: dict[tuple[str, ...], PatternValue | None] = {}  # by the names of a module
        for place, (pattern, value) in enumerate((patterns or {}).items()):
            if NAMED.fullmatch(pattern) or NUMBERED.fullmatch(pattern):
                ending = pattern.removesuffix("$").replace("\\.", ".")
                self._named.setdefault(ending, (place, value))
            else:
                self._others.append((place, Pattern(pattern), value))
        if len(self._others) > MOST_PATTERNS:
            raise InvalidRequest(
                f"{len(self._others)} patterns of ranks or alphas are regular expressions, and at most "
                f"{MOST_PATTERNS} are read; name modules instead"
            )

    def first(self, names: tuple[str, ...], default: PatternValue) -> PatternValue:
        """Return the value of the first pattern that matches an end of one of the names."""
        if names not in self._values:
            self._values[names] = self._first(names)
        value = self._values[names]
        return default if value is None else value

    def _first(self, names: tuple[str, ...]) -> PatternValue | None:
        ends = [ending for name in names for ending in endings(name)] if self._named else []
        ends += [NUMBER.sub(r"\\d+", ending) for ending in ends]
        hits = [self._named[ending] for ending in ends if ending in self._named]
        hits += [(place, value) for place, each, value in self._others if any(map(each.matches_end, names))]
        return min(hits)[1] if hits else None
