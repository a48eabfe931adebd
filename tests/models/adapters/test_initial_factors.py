"""What a fresh adapter begins with."""

import zlib
from functools import reduce

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spmd_tx.models.adapters.lora import init_a

pytestmark = pytest.mark.usefixtures("quickly_compiled")

SHAPES = {"q": (2, 3, 4), "head": (2, 5), "expert_up": (2, 2, 3, 4), "o": (2, 3, 6)}


def test_each_row_is_drawn_with_a_key_of_its_map_and_place():
    key = jax.random.key(3)
    drawn = jax.jit(lambda key: init_a(SHAPES, key))(key)
    for name, (*lead, width) in SHAPES.items():
        (of_map,) = jax.random.split(jax.random.fold_in(key, zlib.crc32(name.encode())), 1)
        bound = float(1 / np.sqrt(width))
        for place in np.ndindex(*lead):
            of_row = reduce(jax.random.fold_in, place, of_map)
            expected = jax.random.uniform(of_row, (width,), jnp.float32, -bound, bound)
            assert np.array_equal(drawn[name][place], expected), (name, place)
