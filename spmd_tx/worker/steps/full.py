"""Full-parameter training: steps that train the base model itself, for one model at a time.

Weights, gradients and moments are kept in fp32, split over fsdp and tp (ZeRO, Rajbhandari et al. 2020).
Layers take them rounded to the dtype of the published copy, so that the sampler computes with the same
numbers.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from spmd_tx.errors import StartError
from spmd_tx.models.adapters.lora import Adapters, Lora
from spmd_tx.models.backbone import backbone
from spmd_tx.models.base_weights import Weights, weights
from spmd_tx.models.declared.layers import StackPlace
from spmd_tx.models.declared.maps import AdapterGroup
from spmd_tx.models.declared.model import Model
from spmd_tx.models.forward_pass import Pass
from spmd_tx.models.layers import product
from spmd_tx.models.named import Named
from spmd_tx.protocol.kernels import Kernels
from spmd_tx.sharding.collectives import gather, replicate_rows, sum_scatter, varying
from spmd_tx.sharding.mesh import DATA, FSDP, AnyMesh
from spmd_tx.sharding.tree_node import TreeNode
from spmd_tx.sharding.weight import Weight, shardings, specs
from spmd_tx.worker.steps.adamw import AdamWInputs, adamw
from spmd_tx.worker.steps.adapters import GROUPS
from spmd_tx.worker.steps.losses import TokenLossInputs
from spmd_tx.worker.steps.optimizer import Trained, norms_of, squares_of
from spmd_tx.worker.steps.train import Rows, both_loras, logprobs_and_losses, loss_and_grad, segment_attend


class FullState(TreeNode):
    """Holds the state of the trained model in fp32. Leaves are arrays or declarations."""

    w: Weights[Any]
    grad_sum: Weights[Any]  # since the last optim_step
    mu: Weights[Any]
    nu: Weights[Any]
    step: Any  # int32
    groups: Any  # float32 [3], in the order of GROUPS: 1 if the group is trained, else 0


def full_state(model: Model, mesh: AnyMesh) -> FullState:
    """Declare the state. Raises StartError for a model whose gradients are not implemented."""
    if model.n_experts or model.packed or model.encoding is not None:
        what = "has experts" if model.n_experts else "is quantised"
        raise StartError(
            f"this {model.architecture} {what}, and --full-parameters trains dense models in bfloat16, "
            "float16 or float32; leave it out to train LoRA adapters"
        )
    w = weights(model, mesh, jnp.float32, split_over_fsdp=True).trained
    return FullState(w, w, w, w, Weight((), P(), jnp.int32), Weight((len(GROUPS),), P(), jnp.float32))


def groups_of(model: Model) -> Weights[AdapterGroup]:
    """Return the flag that each array follows: norms that of what they feed, the embedding the head's."""
    groups: dict[str, AdapterGroup] = {}
    for place in model.places:
        of_mixer = {"attention_norm", *(array.name for array in place.layer.mixer.arrays(0, ""))}
        for array in model.arrays(place):
            is_mixers = array.name in of_mixer or array.name.removesuffix("_bias") in of_mixer
            groups[place.name(array.name)] = "attn" if is_mixers else "mlp"
    head: AdapterGroup | None = None if model.is_tied else "unembed"
    return Weights("unembed", Named(groups), "unembed", head)


def make_publish(mesh: Mesh, base: Weights[Weight]) -> Callable[[Weights[Array]], Weights[Array]]:
    """Make w -> the copy from which samplers draw, as ``base`` declares it."""

    def publish(w: Weights[Array]) -> Weights[Array]:
        def rounded(x: Array, weight: Weight) -> Array:
            # A large fp32 may overflow in bf16, and an infinity would turn every row into NaN.
            largest = float(jnp.finfo(weight.dtype).max)
            return jnp.clip(x, -largest, largest).astype(weight.dtype)

        return jax.tree.map(rounded, w, base)

    return jax.jit(publish, out_shardings=shardings(mesh, base))


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _gathered(dimension: int, dtype: Any, part: Array) -> Array:
    """Gather a part over fsdp in the compute dtype; its gradients are summed in fp32."""
    return gather(part.astype(dtype), FSDP, dimension)


def _gathered_forward(dimension: int, dtype: Any, part: Array) -> tuple[Array, None]:
    return _gathered(dimension, dtype, part), None


def _gathered_backward(dimension: int, dtype: Any, _: None, grad: Array) -> tuple[Array]:
    return (sum_scatter(grad.astype(jnp.float32), FSDP, dimension),)


_gathered.defvjp(_gathered_forward, _gathered_backward)


def _whole(part: Array, declared: Weight, dtype: Any, *, in_layer: bool = False) -> Array:
    """Return an array that no longer is split over fsdp, in the compute dtype."""
    axes = tuple(declared.spec)[1:] if in_layer else tuple(declared.spec)
    if FSDP not in axes or lax.axis_size(FSDP) == 1:
        return part.astype(dtype)
    return _gathered(axes.index(FSDP), dtype, part)


def _no_lora(x: Array, _: Any) -> Array:
    return jnp.zeros((), x.dtype)


def _logits(table_VD: Array, h_BTD: Array, dtype: Any) -> Array:
    return product("BTD,VD->BTV", h_BTD, table_VD.astype(dtype))


class _Steps:
    """Holds what the forward pass of training needs to know."""

    def __init__(self, model: Model, base: Weights[Weight], state: FullState, kernels: Kernels) -> None:
        self._model, self._base, self._state, self._kernels = model, base, state, kernels
        self._dtype = base.embed.dtype
        self.logits = partial(_logits, dtype=self._dtype)

    def hidden(
        self, w: Weights[Array], images: Array | None, rows: Rows, remat: str | None
    ) -> tuple[Array, Array]:
        """Return hidden states [B, T, D], and the head's whole table [V, D] in fp32.

        ``images`` are tokens of images as in Weights, which are not trained.
        """
        w = jax.tree.map(varying, w)
        # Without a slot axis: nothing adapts anything.
        loras = both_loras(lambda slots, scale: _no_lora, rows.slots, jnp.ones((1, 2)))
        how = Pass(
            segment_attend(self._kernels, rows.segments),
            *loras,
            sequence_parallel=True,
            remat=remat,
            take_weights=self._take,
            kernels=self._kernels,
            segments=rows.segments,
            places=rows.places,
        )
        embed = Weights(
            embed=w.embed.astype(self._dtype),
            layers=w.layers,
            final_norm=w.final_norm.astype(self._base.final_norm.dtype),
            head=None,
            images=images,
        )
        nothing = Adapters[Array]({}, Lora(jnp.zeros(()), jnp.zeros(())))
        h_BTD = backbone(self._model, embed, nothing, rows.tokens, rows.positions, how)[0]
        return h_BTD, _whole(w.unembed, self._state.w.unembed, jnp.float32)

    def _take(self, place: StackPlace, w: Named[Array]) -> Named[Array]:
        """Return the arrays of one layer as the published copy has them, not split over fsdp."""

        def whole(name: str) -> Array:
            stored = place.name(name)
            dtype = self._base.layers[stored].dtype
            return _whole(w[name], self._state.w.layers[stored], dtype, in_layer=True)

        return Named({name: whole(name) for name in w})


def make_full_forward(
    model: Model,
    mesh: Mesh,
    base: Weights[Weight],
    state: FullState,
    *,
    kernels: Kernels = Kernels(),
) -> Callable[..., Any]:
    """Make (w, images, rows, loss) -> (logprobs, losses), float32, on every process."""
    steps = _Steps(model, base, state, kernels)
    in_specs = (specs(state.w), specs(base.images), P(DATA), P(DATA))

    @jax.jit
    @partial(jax.shard_map, mesh=mesh, in_specs=in_specs, out_specs=P())
    def forward(w: Weights[Array], images: Array | None, rows: Rows, loss: TokenLossInputs) -> Any:
        h_BTD, table_VD = steps.hidden(w, images, rows, None)
        return logprobs_and_losses(partial(steps.logits, table_VD), h_BTD, rows, loss)

    return forward


def make_full_forward_backward(
    model: Model,
    mesh: Mesh,
    base: Weights[Weight],
    state: FullState,
    remat: str = "full",
    *,
    kernels: Kernels = Kernels(),
) -> Callable[..., Any]:
    """Make (w, grad_sum, images, rows, loss) -> (grad_sum, logprobs, losses); donates ``grad_sum``.

    ``base`` declares the published copy, and tokens of images. ``remat`` is a level of remat.REMAT_LEVELS.
    """
    steps, of_w = _Steps(model, base, state, kernels), specs(state.w)
    in_specs = (of_w, of_w, specs(base.images), P(DATA), P(DATA))

    @partial(jax.jit, donate_argnums=1)
    @partial(jax.shard_map, mesh=mesh, in_specs=in_specs, out_specs=(of_w, P(), P()))
    def forward_backward(
        w: Weights[Array], grad_sum: Weights[Array], images: Array | None, rows: Rows, loss: TokenLossInputs
    ) -> Any:
        # As in train.py, each device differentiates the loss of its own rows.
        (h_BTD, table_VD), pull_back = jax.vjp(lambda w: steps.hidden(w, images, rows, remat), w)
        losses, logprobs, grad_h, grad_table = loss_and_grad(steps.logits, table_VD, h_BTD, rows, loss)
        (grad,) = pull_back((grad_h.astype(h_BTD.dtype), grad_table))
        return jax.tree.map(jnp.add, grad_sum, grad), replicate_rows(logprobs), replicate_rows(losses)

    return forward_backward


def make_full_optim_step(model: Model, mesh: Mesh, state: FullState) -> Callable[..., Any]:
    """Make (state, inputs) -> (state, metrics as in OptimStep); ``state`` is donated.

    Groups that are not trained neither move nor decay, and do not count in norms.
    """
    state_specs, groups = specs(state), groups_of(model)

    @partial(jax.jit, donate_argnums=0)
    @partial(jax.shard_map, mesh=mesh, in_specs=(state_specs, P()), out_specs=(state_specs, P()))
    def optim_step(state: FullState, inputs: AdamWInputs) -> Any:
        flags = jax.tree.map(lambda group: state.groups[GROUPS.index(group)], groups)
        grad = jax.tree.map(lambda x, flag: jnp.where(flag > 0, x, 0.0), state.grad_sum, flags)
        squares = squares_of(grad)
        rates = jax.tree.map(lambda flag: inputs.learning_rate * flag, flags)
        old = Trained(state.w, state.mu, state.nu)
        after = adamw(inputs, rates, squares, state.step, old, grad)
        norms = norms_of(zip(jax.tree.leaves(groups), jax.tree.leaves(squares), strict=True))
        new = state.replace(
            w=after.trained.w,
            grad_sum=jax.tree.map(jnp.zeros_like, grad),
            mu=after.trained.mu,
            nu=after.trained.nu,
            step=state.step + after.applied.astype(jnp.int32),
        )
        return new, {"grad_norm": after.norm, "applied": after.applied} | norms

    return optim_step
