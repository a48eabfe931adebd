"""The names under which clients ask for the base model, and where they find its tokenizer."""

import re
from dataclasses import dataclass
from pathlib import Path

from spmd_tx.errors import InvalidRequest

# The names that hosted Tinker gives to a model with contexts of up to so many tokens.
VARIANT = re.compile(r"(?P<model>.+):peft:(?P<tokens>[0-9]{1,9})")
# Repositories that give tokenizers only to those who have signed, and one that has the same for everybody;
# the SDK and tinker-cookbook take it, too.
GATED = "meta-llama/Llama-3"
OPEN_TO_ALL = "thinkingmachineslabinc/meta-llama-3-instruct-tokenizer"


@dataclass(frozen=True)
class ServedNames:
    """Holds the names of the base model."""

    names: tuple[str, ...]  # the first one is that of answers
    max_context: int  # tokens

    def find(self, name: str) -> str | None:
        """Return the model's name in answers, or None if another model is meant.

        "NAME:peft:N" is answered with that variant. Raises InvalidRequest if N is above the context.
        """
        if name in self.names:
            return self.names[0]
        variant = VARIANT.fullmatch(name)
        if variant is None or variant["model"] not in self.names:
            return None
        tokens = int(variant["tokens"])
        if not 1 <= tokens <= self.max_context:
            raise InvalidRequest(
                f"base_model is {name!r}; contexts have 1 to {self.max_context} tokens here: ask for "
                f"{variant['model']!r}, or serve with a larger --max-context-length"
            )
        return f"{self.names[0]}:peft:{tokens}"

    def need(self, name: str) -> str:
        """Return the model's name in answers. Raises InvalidRequest if another model is meant."""
        served_name = self.find(name)
        if served_name is None:
            served = " and ".join(map(repr, self.names))
            raise InvalidRequest(f"base_model is {name!r}; this server serves {served} only")
        return served_name


def tokenizer_id(base_model: str, directory: Path) -> str:
    """Return where clients find the tokenizer: a Hugging Face id, or the directory of the model."""
    if Path(base_model).is_dir():
        return str(directory)
    return OPEN_TO_ALL if base_model.startswith(GATED) else base_model
