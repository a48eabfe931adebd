"""Reads the keys of a Hugging Face ``config.json``, and says which of them a family cannot follow."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


class Refusal(Exception):
    """Says what is wrong with a config.json, as a sentence without its subject: "lacks the key 'x'"."""


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

    def count(self, key: str) -> int:
        """Return a positive integer."""
        value = self.need(key)
        if not isinstance(value, int) or value < 1:
            raise Refusal(f"sets {key} to {value!r}, which must be a positive integer")
        return value

    def refuse(self, **plain: Any) -> None:
        """Raise Refusal where a key is set to something else than what is plain, which means: not set."""
        for key, value in plain.items():
            found = self.raw.get(key)
            if found and found != value:
                raise Refusal(f"sets {key} to {found!r}, which is not supported")

    def sizes(self) -> dict[str, Any]:
        """Return what all decoder-only models have, by the names of ModelConfig."""
        heads = self.count("num_attention_heads")
        d_model = self.count("hidden_size")
        return {
            "architecture": self.raw["architectures"][0],
            "vocab_size": self.count("vocab_size"),
            "d_model": d_model,
            "n_layers": self.count("num_hidden_layers"),
            "n_heads": heads,
            "n_kv_heads": self.get("num_key_value_heads") or heads,
            "head_dim": self.get("head_dim") or d_model // heads,
            "rms_norm_eps": float(self.need("rms_norm_eps")),
            "tied_embeddings": bool(self.get("tie_word_embeddings", False)),
            "max_positions": self.count("max_position_embeddings"),
        }

    def experts(self) -> tuple[int, int]:
        """Return the number of experts, and how many of them a token chooses."""
        experts = self.get("num_local_experts") or self.need("num_experts")  # the first in transformers 5
        chosen = self.need("num_experts_per_tok")
        if not 1 <= chosen <= experts:
            raise Refusal(
                f"has {experts} experts and chooses {chosen} of them for a token; "
                "num_experts_per_tok must lie between 1 and num_experts"
            )
        return experts, chosen
