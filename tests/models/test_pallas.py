"""Kernels that do nothing but say where an array lies."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from spmd_tx.models.pallas import in_main_memory


def loop(x, interpret):
    def turn(x, number):
        return in_main_memory(x.at[number].add(1.0), interpret=interpret), None

    mesh = Mesh(np.array(jax.devices()[:1]), ("a",))
    run = partial(jax.shard_map, mesh=mesh, in_specs=P("a"), out_specs=P("a"))
    return run(lambda x: jax.lax.scan(turn, x, jnp.arange(4))[0])(x)


def test_what_a_loop_updates_in_main_memory_is_what_it_updates():
    found = jax.jit(partial(loop, interpret=True))(jnp.zeros((8, 128)))
    assert np.array_equal(found[:, 0], [1, 1, 1, 1, 0, 0, 0, 0])


def test_the_kernel_wants_its_array_in_main_memory():
    program = jax.jit(partial(loop, interpret=False)).trace(jnp.zeros((8, 128)))
    text = program.lower(lowering_platforms=("tpu",)).as_text().replace("\\22", '"')
    assert '"output_memory_space_colors": [{"color":0}]' in text
    assert '"input_memory_space_colors": [{"operand_index":0,"color":0}]' in text
    assert "output_operand_alias" in text
