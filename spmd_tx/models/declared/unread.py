"""Says which tensors a checkpoint may have beside those that are declared, since they change no number.

All others are refused: a model that leaves them out does not compute what it was trained to.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass

FREQUENCIES = r".*\.rotary_emb\.inv_freq"  # which follow from config.json
# A head, also in the text model of a model with vision, and as other libraries wrap it.
HEAD = re.compile(r"(?:model\.)?(?:language_model\.)?(?:model\.)?lm_head\.weight")
PREDICTS = "eh_proj."  # what a layer that predicts further tokens has, and no other


def is_head(name: str) -> bool:
    """Whether a tensor of a checkpoint is the vocabulary head."""
    return HEAD.fullmatch(name) is not None


@dataclass(frozen=True)
class Unread:
    """Holds what a model leaves out."""

    ignored: tuple[str, ...] = ()  # regular expressions
    further: tuple[str, ...] = ()  # how the names of layers begin that predict further tokens
    copied: str | None = None  # the tensor that heads must be copies of; None: there are no such heads

    def copies(self, names: Iterable[str]) -> list[str]:
        """Return the tensors that must be equal to ``copied``."""
        return [] if self.copied is None else sorted(filter(is_head, names))

    def unknown(self, names: Iterable[str]) -> list[str]:
        """Return the tensors for which there is no use, and which are not known to be without effect."""
        present = set(names)
        begins = [at for at in self.further if any(name.startswith(at + PREDICTS) for name in present)]
        patterns = [*self.ignored, FREQUENCIES, *(re.escape(at) + ".*" for at in begins)]
        harmless = re.compile("|".join(f"(?:{each})" for each in patterns))
        rest = {name for name in present if not harmless.fullmatch(name)}
        return sorted(rest - set(self.copies(rest)))
