"""Reads the keys of a Hugging Face ``config.json``, and says which of them a family cannot follow.

Any JSON may stand there, so each value is checked where it is read.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

MOST, MOST_LAYERS = 2**31 - 1, 1000
LEAST_NUMBER, MOST_NUMBER = 1e-30, 1e30  # whose products fp32 holds
MOST_SHOWN = 200  # characters of a value in a message


class Refusal(Exception):
    """Says what is wrong with a config.json, as a sentence without its subject: "lacks the key 'x'"."""


def shown(value: Any) -> str:
    """Return a value for a message, cut where it is long."""
    text = repr(value)
    return text if len(text) <= MOST_SHOWN else f"{text[:MOST_SHOWN]}..."


@dataclass(frozen=True)
class ConfigKeys:
    """Holds a config.json, or an object in it. A key whose value is null counts as absent."""

    raw: Mapping[str, Any]
    of: str = ""  # in messages, after a key: " of its quantization_config"

    def has(self, key: str) -> bool:
        return self.raw.get(key) is not None

    def get(self, key: str, default: Any = None) -> Any:
        """Return a value unchecked."""
        return self.raw[key] if self.has(key) else default

    def need(self, key: str) -> Any:
        """Return a value unchecked. Raises Refusal where there is none."""
        if not self.has(key):
            raise Refusal(f"lacks the key {key!r}{self.of}")
        return self.raw[key]

    def wrong(self, key: str, supported: str) -> Refusal:
        """Return the refusal of a value. ``supported`` says which others are followed."""
        return Refusal(f"sets {key}{self.of} to {shown(self.raw.get(key))}{supported}")

    def count(self, key: str, least: int = 1, most: int = MOST) -> int:
        """Return an integer, which must be there."""
        value = self.need(key)
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            raise self.wrong(key, f", which must be an integer from {least} to {most}")
        return value

    def count_or(self, key: str, default: int, least: int = 1, most: int = MOST) -> int:
        """Return an integer, or the default where there is none."""
        return self.count(key, least, most) if self.has(key) else default

    def number(self, key: str, default: float | None = None, *, may_be_zero: bool = False) -> float:
        """Return a positive number; without a default there must be one."""
        value = self.need(key) if default is None else self.get(key, default)
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not (LEAST_NUMBER <= value <= MOST_NUMBER or (may_be_zero and value == 0)):
            least = "0 or" if may_be_zero else "a number"
            raise self.wrong(key, f", which must be {least} from {LEAST_NUMBER:g} to {MOST_NUMBER:g}")
        return float(value)

    def numbers(self, key: str, count: int) -> tuple[float, ...]:
        """Return a list of so many positive numbers."""
        value = self.need(key)
        if not isinstance(value, list) or len(value) != count:
            raise self.wrong(key, f", which must be a list of {count} numbers")
        return tuple(ConfigKeys({key: each}, self.of).number(key) for each in value)

    def flag(self, key: str, default: bool = False) -> bool:
        """Return true or false."""
        value = self.get(key, default)
        if not isinstance(value, bool):
            raise self.wrong(key, ", which must be true or false")
        return value

    def names(self, key: str) -> list[str]:
        """Return a list of names, which is empty where there is none."""
        value = self.get(key, [])
        if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
            raise self.wrong(key, ", which must be a list of names")
        return value

    def of_layers(self, key: str, *allowed: Any) -> list[Any] | None:
        """Return a list with one of the allowed values for each layer; None: there is no list."""
        value, n_layers = self.get(key), self.layers()
        if value is None:
            return None
        if not isinstance(value, list) or any(each not in allowed for each in value):
            raise self.wrong(key, f", which must be a list of {' or '.join(map(repr, allowed))}")
        if len(value) != n_layers:
            raise self.wrong(key, f", which are {len(value)} for {n_layers} layers; each must have one")
        return value

    def within(self, key: str, of: str = "") -> "ConfigKeys":
        """Return an object, which is empty where there is none. ``of`` is what messages call it."""
        value = self.get(key, {})
        if not isinstance(value, Mapping):
            raise self.wrong(key, ", which must be an object with keys of its own")
        return ConfigKeys(value, of or f" of its {key}")

    def with_defaults(self, **defaults: Any) -> "ConfigKeys":
        """Return the keys with values for those that are absent."""
        return replace(self, raw={**self.raw, **{key: self.get(key, defaults[key]) for key in defaults}})

    def text(self) -> tuple["ConfigKeys", bool]:
        """Return the keys of the text model, and whether it is within a model with vision."""
        inner = self.within("text_config")
        if not inner.raw:
            return self, False
        outer = {key: self.raw[key] for key in ("architectures", "tie_word_embeddings") if self.has(key)}
        return ConfigKeys({**inner.raw, **outer}), True

    def only(self, **supported: Any) -> None:
        """Raise Refusal where a key has another value than the supported one, be it false or empty."""
        for key, value in supported.items():
            if self.get(key, value) != value:
                raise self.wrong(key, f", which is not supported; supported is {value!r}")

    def layers(self) -> int:
        return self.count("num_hidden_layers", most=MOST_LAYERS)

    def experts(self) -> tuple[int, int]:
        """Return the number of experts, and how many of them a token chooses."""
        experts = self.count("num_local_experts" if self.has("num_local_experts") else "num_experts")
        chosen = self.count_or("num_experts_per_tok", 0, least=0)
        if not 1 <= chosen <= experts:
            raise Refusal(
                f"has {experts} experts and chooses {chosen} of them for a token; "
                "num_experts_per_tok must be between 1 and num_experts"
            )
        return experts, chosen
