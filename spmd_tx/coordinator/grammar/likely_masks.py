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
        self._forget()

    def _forget(self) -> None:
        self._places = dict[bytes, int]()  # of the masks in all lists
        self._masks = list[np.ndarray]()
        self._followers = list[Counter[int]]()
        self._likeliest = list[int]()  # of the followers; the mask itself until one is known
        self._latest: tuple[np.ndarray, int] | None = None  # mask and place

    def note(self, mask: np.ndarray, follower: np.ndarray) -> None:
        """Note that behind a token within ``mask`` those of ``follower`` were allowed."""
        if len(self._masks) >= REMEMBERED:
            self._forget()
        place, next_place = self._place(mask), self._place(follower)
        followers = self._followers[place]
        followers[next_place] += 1
        if followers[next_place] > followers[self._likeliest[place]]:
            self._likeliest[place] = next_place

    def behind(self, mask: np.ndarray, steps: int) -> list[np.ndarray]:
        """Return the likely masks of up to so many steps, of which ``mask`` is the first one's."""
        place, used, masks = self._places.get(mask.tobytes()), set[int](), list[np.ndarray]()
        if place is None:
            return [mask] * steps
        while len(masks) < steps and (place in used or len(used) < MASKS_OF_ROW):
            used.add(place)
            masks.append(self._masks[place])
            place = self._likeliest[place]
        return masks

    def _place(self, mask: np.ndarray) -> int:
        if self._latest is not None and self._latest[0] is mask:
            return self._latest[1]
        key = mask.tobytes()
        place = self._places.get(key)
        if place is None:
            place = self._places[key] = len(self._masks)
            self._masks.append(mask)
            self._followers.append(Counter())
            self._likeliest.append(place)
        self._latest = mask, place
        return place
