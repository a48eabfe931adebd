import dataclasses
import pickle

import jax
import jax.numpy as jnp
import pytest

from spmd_tx.sharding.tree_node import TreeNode, static


class Pair(TreeNode):
    first: object
    second: object = None
    name: str = static(default="a")


class Mutable(TreeNode, frozen=False):
    first: object


def test_fields_are_branches_in_their_order_and_static_ones_belong_to_the_structure():
    leaves, structure = jax.tree.flatten(Pair(1, (2, 3), "b"))
    assert leaves == [1, 2, 3]
    assert structure != jax.tree.structure(Pair(1, (2, 3), "c"))
    assert jax.tree.unflatten(structure, [4, 5, 6]) == Pair(4, (5, 6), "b")
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(Pair(1, 2))]
    assert paths == [".first", ".second"]  # which name arguments of programs, and arrays of checkpoints


def test_a_program_is_traced_anew_for_another_static_field():
    traced = []

    @jax.jit
    def doubled(pair):
        traced.append(pair.name)
        return pair.replace(first=pair.first * 2)

    assert doubled(Pair(jnp.ones(2))).first.tolist() == [2.0, 2.0]
    doubled(Pair(jnp.ones(2)))
    doubled(Pair(jnp.ones(2), name="b"))
    assert traced == ["a", "b"]


def test_a_node_changes_by_a_copy_unless_it_is_mutable():
    pair = Pair(1, 2, "b")
    assert pair.replace(first=3) == Pair(3, 2, "b")
    assert pickle.loads(pickle.dumps(pair)) == pair
    with pytest.raises(dataclasses.FrozenInstanceError):
        pair.first = 3  # pyright: ignore[reportAttributeAccessIssue]
    mutable = Mutable(1)
    mutable.first = 3
    assert jax.tree.leaves(mutable) == [3]
