"""Steps on single adapters: fill, read, write, and copy to the sampler bank.

They are jitted functions of global arrays. None is hot, so the partitioner may place the work.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from spmd_tx.models.adapters import lora
from spmd_tx.models.adapters.lora import Adapters, Lora
from spmd_tx.models.declared.model import Model
from spmd_tx.sharding.weight import Weight, shardings
from spmd_tx.worker.steps.sample import Bank
from spmd_tx.worker.steps.train_state import TrainState, put_slot, take_slot
from spmd_tx.worker.storage.checkpoints import SlotState

GROUPS = ("attn", "mlp", "unembed")  # in the order of the flags


@dataclass(frozen=True)
class AdapterSteps:
    """Holds the steps; each donates the state that it replaces."""

    create: Callable[..., TrainState]  # (state, slot, seed [2], ranks [2], scale [2], groups [3])
    read: Callable[..., SlotState]  # (state, slot)
    write: Callable[..., TrainState]  # (state, content, slot, scale [2])
    to_bank: Callable[..., Bank]  # (bank, adapter, bank slot, scale [2])
    weights_of: Callable[..., Adapters[Array]]  # (stack, slot); fp32


def one_adapter(stack: Adapters[Weight]) -> Adapters[Weight]:
    """Declare one adapter of a declared stack, without the slot axis."""

    def leaf(weight: Weight) -> Weight:
        axis = len(weight.shape) - 3
        shape = weight.shape[:axis] + weight.shape[axis + 1 :]
        spec = tuple(weight.spec)
        return Weight(shape, P(*spec[:axis], *spec[axis + 1 :]), weight.dtype)

    return jax.tree.map(leaf, stack)


def slot_weights(state: TrainState) -> SlotState:
    """Declare the contents of a checkpoint of one slot."""
    one = one_adapter(state.w)
    return SlotState(w=one, mu=one, nu=one, step=Weight((), P(), jnp.int32))


def make_adapter_steps(model: Model, mesh: Mesh, state: TrainState, bank: Bank) -> AdapterSteps:
    """Compile the steps for the declared training state and bank."""
    state_shardings, bank_shardings = shardings(mesh, state), shardings(mesh, bank)
    one_shardings = shardings(mesh, one_adapter(state.w))
    slot_shardings = shardings(mesh, slot_weights(state))

    @partial(jax.jit, donate_argnums=0, out_shardings=state_shardings)
    def write(state: TrainState, one: SlotState, slot: Array, scale: Array) -> TrainState:
        zeros = jax.tree.map(jnp.zeros_like, one.w)
        return TrainState(
            w=put_slot(state.w, one.w, slot),
            grad_sum=put_slot(state.grad_sum, zeros, slot),
            mu=put_slot(state.mu, one.mu, slot),
            nu=put_slot(state.nu, one.nu, slot),
            step=state.step.at[slot].set(one.step),
            scale=state.scale.at[slot].set(scale),
        )

    @partial(jax.jit, donate_argnums=0, out_shardings=state_shardings)
    def create(
        state: TrainState, slot: Array, seed_2: Array, ranks_2: Array, scale: Array, groups_3: Array
    ) -> TrainState:
        fresh = initial(model, state.w, seed_2, ranks_2, groups_3)
        zeros = jax.tree.map(jnp.zeros_like, fresh)
        return write(state, SlotState(fresh, zeros, zeros, jnp.int32(0)), slot, scale)

    @partial(jax.jit, out_shardings=slot_shardings)
    def read(state: TrainState, slot: Array) -> SlotState:
        w, mu, nu = (take_slot(tree, slot) for tree in (state.w, state.mu, state.nu))
        return SlotState(w, mu, nu, state.step[slot])

    @partial(jax.jit, donate_argnums=0, out_shardings=bank_shardings)
    def to_bank(bank: Bank, one: Adapters[Array], slot: Array, scale: Array) -> Bank:
        # A large fp32 may overflow in bf16, and an infinity would turn the rows of all tenants into NaN.
        largest = float(jnp.finfo(jax.tree.leaves(bank.w)[0].dtype).max)
        finite = jax.tree.map(lambda x: jnp.clip(x, -largest, largest), one)
        return Bank(put_slot(bank.w, finite, slot), bank.scale.at[slot].set(scale))

    @partial(jax.jit, out_shardings=one_shardings)
    def weights_of(stack: Adapters[Array], slot: Array) -> Adapters[Array]:
        return jax.tree.map(lambda x: x.astype(jnp.float32), take_slot(stack, slot))

    return AdapterSteps(create, read, write, to_bank, weights_of)


def initial(
    model: Model, stack: Adapters[Array], seed_2: Array, ranks_2: Array, groups_3: Array
) -> Adapters[Array]:
    """Make a fresh adapter: A uniform in its rank and groups (attention, MLP, unembedding), all else zero.

    The two ranks are that of the adapter and that of its experts' factors.
    """
    key = jax.random.fold_in(jax.random.key(seed_2[0]), seed_2[1])

    groups = {name: groups_3[GROUPS.index(model.adapted[name].group)] for name in stack.layers}
    groups["head"] = groups_3[2]
    stacked = {**stack.layers, "head": stack.head}

    def one_slot(factor: Array) -> tuple[int, ...]:
        return *factor.shape[:-3], *factor.shape[-2:]

    drawn = lora.init_a({name: one_slot(factors.a) for name, factors in stacked.items()}, key)

    def pair(name: str) -> Lora[Array]:
        a, rank = drawn[name], ranks_2[1 if lora.has_experts(model, name) else 0]
        is_used = groups[name] & (jnp.arange(a.shape[-2]) < rank)
        a = jnp.where(is_used.reshape((1,) * (a.ndim - 2) + (-1, 1)), a, 0.0)
        return Lora(a, jnp.zeros(one_slot(stacked[name].b), jnp.float32))

    return Adapters({name: pair(name) for name in stack.layers}, pair("head"))
