"""Rotary position embeddings (Su et al. 2021) as configurations declare them."""

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Linear:
    """Divides all frequencies, as if positions were closer together (Chen et al. 2023)."""

    factor: float

    def scaled(self, frequencies: tuple[float, ...], theta: float) -> tuple[float, ...]:
        return tuple(frequency / self.factor for frequency in frequencies)


@dataclass(frozen=True)
class Llama3:
    """Divides the low frequencies, and leaves the high ones as they are (Dubey et al. 2024)."""

    factor: float
    low: float  # turns within the original positions below which a frequency is divided, and
    high: float  # above which it is kept
    original_positions: int  # that the model was trained with first

    def scaled(self, frequencies: tuple[float, ...], theta: float) -> tuple[float, ...]:
        def one(frequency: float) -> float:
            turns = self.original_positions * frequency / (2 * math.pi)
            if self.low == self.high:
                return frequency if turns > self.high else frequency / self.factor
            share = min(max((turns - self.low) / (self.high - self.low), 0.0), 1.0)
            return frequency * ((1 - share) / self.factor + share)

        return tuple(one(frequency) for frequency in frequencies)


@dataclass(frozen=True)
class Yarn:
    """Divides the low frequencies and sharpens attention (YaRN, Peng et al. 2023)."""

    factor: float
    original_positions: int  # that the model was trained with first
    fast: float = 32.0  # turns within these positions from which on a frequency is kept, and
    slow: float = 1.0  # up to which it is divided
    truncate: bool = True  # whether the range between the two is widened to whole numbers
    attention_factor: float | None = None  # of cosines and sines; None: by the formula
    mscale: float = 0.0  # weights in this formula; both must be set
    mscale_all_dim: float = 0.0

    def scaled(self, frequencies: tuple[float, ...], theta: float) -> tuple[float, ...]:
        width = 2 * len(frequencies)
        first, last = (
            width * math.log(self.original_positions / (turns * 2 * math.pi)) / (2 * math.log(theta))
            for turns in (self.fast, self.slow)
        )
        if self.truncate:
            first, last = math.floor(first), math.ceil(last)
        first, last = max(first, 0), min(last, width - 1)
        if first == last:
            last += 0.001

        def one(number: int, frequency: float) -> float:
            share = min(max((number - first) / (last - first), 0.0), 1.0)
            return frequency * (share / self.factor + 1 - share)

        return tuple(one(number, frequency) for number, frequency in enumerate(frequencies))

    @property
    def amplitude(self) -> float:
        """What cosines and sines are multiplied by."""
        if self.attention_factor is not None:
            return self.attention_factor
        if self.mscale and self.mscale_all_dim:
            return self._grown(self.mscale) / self._grown(self.mscale_all_dim)
        return self._grown(1.0)

    @property
    def score_factor(self) -> float:
        """What latent attention multiplies its scores by (DeepSeek-AI 2024)."""
        return self._grown(self.mscale_all_dim) ** 2 if self.mscale_all_dim else 1.0

    def _grown(self, weight: float) -> float:
        return 0.1 * weight * math.log(self.factor) + 1.0 if self.factor > 1 else 1.0


@dataclass(frozen=True)
class LongRope:
    """Divides each frequency by a factor of its own, and grows cosines and sines (Ding et al. 2024).

    There are other factors for longer texts, with which a text's first tokens would have other keys. They are
    not used: a model is served up to the positions that these ones are for.
    """

    factors: tuple[float, ...]  # of each pair
    original_positions: int
    amplitude: float  # what cosines and sines are multiplied by

    def scaled(self, frequencies: tuple[float, ...], theta: float) -> tuple[float, ...]:
        return tuple(each / factor for each, factor in zip(frequencies, self.factors, strict=True))


Scaling = Linear | Llama3 | Yarn | LongRope


@dataclass(frozen=True)
class Rope:
    """Declares the angles by which a head's numbers are rotated."""

    theta: float
    width: int = 0  # how many of a head's numbers are rotated, from the first on; 0: all
    scaling: Scaling | None = None
    is_interleaved: bool = False  # whether pairs are neighbours, not the same places of two halves
    query_growth: float = 0.0  # by which queries grow after each span of positions, as in Llama 4
    query_span: int = 0  # tokens
    # How many pairs time, row and column of images rotate; they take turns. (): positions rotate all.
    sections: tuple[int, ...] = ()

    @property
    def is_plain(self) -> bool:
        """Whether all numbers of a head are rotated in halves, by unscaled frequencies."""
        return self == Rope(self.theta)

    def frequencies(self, head_width: int) -> tuple[float, ...]:
        """Return the angle per position of each pair, in radians."""
        width = self.width or head_width
        plain = tuple(self.theta ** (-number / width) for number in range(0, width, 2))
        return plain if self.scaling is None else self.scaling.scaled(plain, self.theta)

    @property
    def axes(self) -> tuple[int, ...]:
        """Which of time, row and column rotates each pair: 0, 1, 2, 0, ... while the latter have pairs."""
        _, *others = self.sections
        of_others = {axis + 3 * turn: axis for axis, pairs in enumerate(others, 1) for turn in range(pairs)}
        return tuple(of_others.get(pair, 0) for pair in range(sum(self.sections)))

    @property
    def amplitude(self) -> float:
        """What cosines and sines are multiplied by."""
        return self.scaling.amplitude if isinstance(self.scaling, Yarn | LongRope) else 1.0

    @property
    def score_factor(self) -> float:
        """What latent attention multiplies its scores by."""
        return self.scaling.score_factor if isinstance(self.scaling, Yarn) else 1.0

    def most_positions(self, max_position_embeddings: int) -> int:
        """Return how many positions the model can tell apart; YaRN adds some to its table."""
        if isinstance(self.scaling, LongRope):
            return min(max_position_embeddings, self.scaling.original_positions)
        if isinstance(self.scaling, Yarn):
            return max(max_position_embeddings, int(self.scaling.factor * self.scaling.original_positions))
        return max_position_embeddings
