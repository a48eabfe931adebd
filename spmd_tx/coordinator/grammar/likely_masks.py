"""Remembers which mask has followed which, to send the masks of several steps at once. Pure.

What is drawn with a wrong one is dropped, so this decides nothing but how fast it goes.
"""

from collections import Counter

import numpy as np

from spmd_tx.protocol.commands import MASKS_OF_ROW

REMEMBERED = 32  # masks; of a large vocabulary one has 20 kB


class LikelyMasks:
    """Holds the masks of one grammar that its samples have met."""

    def __init__(self) -> None:
        self._masks = dict[bytes, np.ndarray]()
        self._followers = dict[bytes, Counter[bytes]]()

    def note(self, mask: np.ndarray, follower: np.ndarray) -> None:
        """Note that behind a token within ``mask`` those of ``follower`` were allowed."""
        if len(self._masks) >= REMEMBERED:
            self._masks.clear()
            self._followers.clear()
        key, next_key = mask.tobytes(), follower.tobytes()
        self._masks.setdefault(key, mask)
        self._masks.setdefault(next_key, follower)
        self._followers.setdefault(key, Counter())[next_key] += 1

    def behind(self, mask: np.ndarray, steps: int) -> list[np.ndarray]:
        """Return the likely masks of up to so many steps, of which ``mask`` is the first one's."""
        key, used = mask.tobytes(), dict[bytes, np.ndarray]()
        masks = list[np.ndarray]()
        while len(masks) < steps and (key in used or len(used) < MASKS_OF_ROW):
            used.setdefault(key, self._masks.get(key, mask))
            masks.append(used[key])
            followers = self._followers.get(key)
            key = followers.most_common(1)[0][0] if followers else key
        return masks
