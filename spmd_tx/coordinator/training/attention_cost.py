"""What attention costs in training, which grows with the rows, beside the products with weights. Pure."""

from collections import Counter
from dataclasses import dataclass

from spmd_tx.models.declared.model import Model

# FLOPs in both passes. Of a token of the row, of which half are seen, by width: a product with keys and one
# with values forward, three and two backward. Of a number of the frozen weights: a product in either pass.
OF_KEYS, OF_VALUES = 4, 3
OF_WEIGHTS = 4


@dataclass(frozen=True)
class AttentionCost:
    """Holds the cost of a token's attention, relative to its products with weights.

    Attention covers a whole row, whatever segments it holds. A token sees half of it on average, or what its
    window has.
    """

    share: float  # per token of the row, of the layers that see all tokens before
    windowed_share: float = 0.0  # the same of the layers with a window, in rows that are no longer than it
    window: int = 0  # tokens; 0: no layer has one

    def of(self, row_length: int) -> float:
        """Return the cost of a token in such a row."""
        return self.share * row_length + self.windowed_share * self._seen(row_length)

    def _seen(self, row_length: int) -> float:
        """Return how long a row is whose tokens see as many without a window as these see within it."""
        if row_length <= self.window:
            return row_length
        return 2 * self.window - self.window * self.window / row_length

    def __str__(self) -> str:
        """Return the cost as a layout has it."""
        windowed = f"+{self.windowed_share}/{self.window}" if self.window else ""
        return f"{self.share}{windowed}"

    @classmethod
    def read(cls, text: str) -> "AttentionCost":
        """Undo ``str``."""
        share, is_windowed, windowed = text.partition("+")
        if not is_windowed:
            return cls(float(share))
        of_window, _, window = windowed.partition("/")
        return cls(float(share), float(of_window), int(window))


def attention_cost(model: Model) -> AttentionCost:
    """Return the cost of a model. All its layers with a window have the same one."""
    widths = Counter[int]()
    for layer in model.layers:
        if (attended := layer.mixer.attended) is not None:
            widths[attended.window] += OF_KEYS * attended.keys + OF_VALUES * attended.values
    weights = OF_WEIGHTS * model.numbers_met()
    shares = {window: float(f"{width / weights:.3g}") for window, width in widths.items()}
    whole = shares.pop(0, 0.0)
    window, windowed = next(iter(shares.items()), (0, 0.0))
    return AttentionCost(whole, windowed, window)
