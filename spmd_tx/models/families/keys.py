"""Reads the keys of a Hugging Face ``config.json``, and says which of them a family cannot follow."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

MOST = 2**31 - 1  # of any integer
MOST_LAYERS = 4096


class Refusal(Exception):
    """Says what is wrong with a config.json, as a sentence without its subject: "lacks the key 'x'"."""


def positive(what: str, value: Any) -> float:
    """Return a value as a number. Raises Refusal, which begins with ``what``, unless it is a positive one."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
        raise Refusal(f"{what} to {value!r}, which must be a positive number")
    return float(value)


def _bounded(key: str, value: int, most: int) -> int:
    if value > most:
        raise Refusal(f"sets {key} to {value}, which must be at most {most}")
    return value


@dataclass(frozen=True)
class Keys:
    """Holds a config.json."""

    raw: Mapping[str, Any]

    def get(self, key: str, default: Any = None) -> Any:
        return self.raw.get(key, default)

    def need(self, key: str) -> Any:
        """Return a value. Raises Refusal where there is none."""
        if self.raw.get(key) is None:
            raise Refusal(f"lacks the key {key!r}")
        return self.raw[key]

    def count(self, key: str, most: int = MOST) -> int:
        """Return a positive integer."""
        value = self.need(key)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise Refusal(f"sets {key} to {value!r}, which must be a positive integer")
        return _bounded(key, value, most)

    def layers(self) -> int:
        """Return the number of layers."""
        return self.count("num_hidden_layers", MOST_LAYERS)

    def count_or(self, key: str, default: int, least: int = 1) -> int:
        """Return an integer from ``least`` on, or the default where there is none."""
        value = self.raw.get(key)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise Refusal(f"sets {key} to {value!r}, which must be an integer from {least} on")
        return _bounded(key, value, MOST)

    def number(self, key: str, default: float | None = None) -> float:
        """Return a positive number; without a default there must be one."""
        value = self.need(key) if default is None else self.raw.get(key)
        return positive(f"sets {key}", default if value is None else value)

    def mapping(self, key: str) -> Mapping[str, Any]:
        """Return an object, which is empty where there is none."""
        value = self.raw.get(key) or {}
        if not isinstance(value, Mapping):
            raise Refusal(f"sets {key} to {value!r}, which must be an object with keys of its own")
        return value

    def text(self) -> tuple["Keys", bool]:
        """Return the keys of the text model, and whether it is within a model with vision."""
        inner = self.mapping("text_config")
        if not inner:
            return self, False
        outer = {"architectures": self.need("architectures")}
        if self.get("tie_word_embeddings") is not None:
            outer["tie_word_embeddings"] = self.get("tie_word_embeddings")
        return Keys({**inner, **outer}), True

    def only(self, **supported: Any) -> None:
        """Raise Refusal where a key has another value than the supported one, be it false or empty."""
        for key, value in supported.items():
            found = self.raw.get(key)
            if found is not None and found != value:
                raise Refusal(f"sets {key} to {found!r}, which is not supported; supported is {value!r}")

    def all_layers(self, kind: str) -> None:
        """Raise Refusal where layer_types has a layer of another kind."""
        kinds = self.raw.get("layer_types") or []
        if any(each != kind for each in kinds):
            raise Refusal(f"sets layer_types to {kinds!r}; supported are layers of {kind} only")

    def refuse(self, **plain: Any) -> None:
        """Raise Refusal where a key is set to something else than what is plain, which means: not set."""
        for key, value in plain.items():
            found = self.raw.get(key)
            if found and found != value:
                raise Refusal(f"sets {key} to {found!r}, which is not supported; only {value!r} is")

    def sizes(self) -> dict[str, Any]:
        """Return what all decoder-only models have, by the names of ModelConfig."""
        heads = self.count("num_attention_heads")
        kv_heads = self.count_or("num_key_value_heads", heads)
        if heads % kv_heads:
            raise Refusal(
                f"has {heads} num_attention_heads, not a multiple of its {kv_heads} num_key_value_heads"
            )
        d_model = self.count("hidden_size")
        return {
            "architecture": self.raw["architectures"][0],
            "vocab_size": self.count("vocab_size"),
            "d_model": d_model,
            "n_layers": self.layers(),
            "n_heads": heads,
            "n_kv_heads": kv_heads,
            "head_dim": self.count_or("head_dim", d_model // heads),
            "rms_norm_eps": self.number("rms_norm_eps"),
            "tied_embeddings": bool(self.get("tie_word_embeddings", False)),
            "max_positions": self.count("max_position_embeddings"),
        }

    def experts(self) -> tuple[int, int]:
        """Return the number of experts, and how many of them a token chooses."""
        experts = self.count("num_local_experts" if self.get("num_local_experts") else "num_experts")
        chosen = self.count_or("num_experts_per_tok", 0, least=0)
        if not 1 <= chosen <= experts:
            raise Refusal(
                f"has {experts} experts and chooses {chosen} of them for a token; "
                "num_experts_per_tok must be between 1 and num_experts"
            )
        return experts, chosen
