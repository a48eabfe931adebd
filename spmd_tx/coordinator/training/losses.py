"""The table of losses (docs/losses.md): inputs per token, and configuration keys with their defaults."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from spmd_tx.errors import InvalidRequest
from spmd_tx.protocol.commands import LOSS_NAMES


@dataclass(frozen=True)
class NumberParameter:
    """Describes a key whose value is a finite number."""

    default: float
    least: float = 0.0


@dataclass(frozen=True)
class WordParameter:
    """Describes a key whose value is one of these words."""

    default: str
    words: tuple[str, ...]


LossParameter = NumberParameter | WordParameter


@dataclass(frozen=True)
class LossEntry:
    """Describes the inputs and the configuration of one loss."""

    needed: tuple[str, ...]
    ignored: frozenset[str]
    optional: tuple[str, ...] = ()
    config: Mapping[str, LossParameter] = field(default_factory=lambda: MappingProxyType({}))
    else_ones: tuple[str, ...] = ()  # like target_tokens; a datum without one has 1 for its every target

    @property
    def inputs(self) -> str:
        """The inputs in words, for error messages."""
        optional = ", ".join((*self.else_ones, *self.optional))
        return ", ".join(self.needed) + (f" and, if you like, {optional}" if optional else "")


@dataclass(frozen=True)
class LossSettings:
    """Holds a loss and its parameters; those that the loss does not use are 0."""

    kind: int  # index into LOSS_NAMES
    clip_low: float = 0.0
    clip_high: float = 0.0  # where stable_reinforce truncates
    beta: float = 0.0  # of the square of the log-ratio
    kl_coeff: float = 0.0

    @property
    def name(self) -> str:
        return LOSS_NAMES[self.kind]


LEFT_OVER = frozenset({"mask", "provenance"})  # in the datums of many training scripts
CLIPS = ("clip_low_threshold", "clip_high_threshold")
_REINFORCED = ("target_tokens", "logprobs", "advantages")


def _reinforced(config: Mapping[str, LossParameter], *more: str) -> LossEntry:
    clips = CLIPS if CLIPS[0] in config else ()
    return LossEntry((*_REINFORCED, *more), LEFT_OVER | {"weights"}, clips, config)


def _clips(low: float, high: float) -> dict[str, LossParameter]:
    return dict(zip(CLIPS, (NumberParameter(low), NumberParameter(high)), strict=True))


LOSSES: dict[str, LossEntry] = {
    "cross_entropy": LossEntry(("target_tokens",), LEFT_OVER, else_ones=("weights",)),
    "importance_sampling": _reinforced({}),
    "ppo": _reinforced(_clips(0.8, 1.2)),
    "cispo": _reinforced(_clips(0.0, 4.0)),
    "dro": _reinforced({"beta": NumberParameter(0.05)}),
    # The paper's thresholds: its ratios are geometric means and so stay close to 1.
    "gspo": _reinforced(_clips(1 - 3e-4, 1 + 4e-4), "sequence_ratio_mask"),
    # Its logprobs are those that were recorded while sampling (stability notes).
    "stable_reinforce": LossEntry(
        ("target_tokens", "advantages"),
        LEFT_OVER | {"weights", "logprobs"},
        config={
            "truncation": NumberParameter(2.0, least=1.0),
            "kl_coeff": NumberParameter(0.0),
            "kl_estimator": WordParameter("k3", ("k3", "k2")),
        },
    ),
}


def loss_settings(name: str, config: Mapping[str, float | str]) -> LossSettings:
    """Return the loss with its parameters. Raises InvalidRequest, which names the wrong key."""
    if name not in LOSSES:
        raise InvalidRequest(f"loss_fn is {name!r}; this service has {', '.join(LOSSES)}")
    keys = LOSSES[name].config
    for key, value in config.items():
        if key not in keys:
            known = ", ".join(keys) or "none"
            raise InvalidRequest(f"loss_fn_config has the key {key!r}; those of {name} are: {known}")
        _check(key, value, keys[key])
    values = {key: config.get(key, known.default) for key, known in keys.items()}
    numbers = {key: value for key, value in values.items() if not isinstance(value, str)}
    low, high = (numbers.get(key, 0.0) for key in CLIPS)
    if low > high:
        raise InvalidRequest(
            f"loss_fn_config has clip_low_threshold {low} above clip_high_threshold {high}; "
            "both are bounds of the probability ratio, low first"
        )
    kind = LOSS_NAMES.index(name)
    if name != "stable_reinforce":
        return LossSettings(kind, low, high, beta=numbers.get("beta", 0.0))
    kl_coeff = numbers["kl_coeff"]
    if values["kl_estimator"] == "k2":
        return LossSettings(kind, clip_high=numbers["truncation"], beta=kl_coeff)
    return LossSettings(kind, clip_high=numbers["truncation"], kl_coeff=kl_coeff)


def _check(key: str, value: float | str, known: LossParameter) -> None:
    if isinstance(known, WordParameter):
        if value not in known.words:
            words = " or ".join(map(repr, known.words))
            raise InvalidRequest(f"loss_fn_config.{key} is {value!r}; it must be {words}")
    elif isinstance(value, str) or not math.isfinite(value) or value < known.least:
        raise InvalidRequest(
            f"loss_fn_config.{key} is {value!r}; it must be a finite number, at least {known.least:g}"
        )
