"""The forward pass of the vision tower over one image: patches to tokens.

All of it runs on one device. The patches of an image are padded to a number that the image alone determines,
so its tokens have the same bits in any company.
Dimension key: N patch, padded; M token (N / 4); D tower width, H heads, E head width, F feed-forward width,
O width of a token, P plane: tokens for the embedding, then those of each deep merger; Q query, K block whose
output is kept, C numbers of a patch.
"""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jaxtyping import Float, UInt8

from spmd_tx.models.declared.tower import MERGED, PATCH_NUMBERS, Tower
from spmd_tx.models.layers import product
from spmd_tx.models.named import Named
from spmd_tx.models.vision.attention import attend
from spmd_tx.models.vision.patches import Grid, patch_places, resampled
from spmd_tx.models.vision.tower_weights import TowerWeights, whole
from spmd_tx.protocol.kernels import Kernels

EPS = 1e-6  # of all norms
THETA = 10000.0  # of the rotary embedding
MEAN, STD = 0.5, 0.5  # of pixels, in all channels


def encode(
    tower: Tower,
    w: TowerWeights[Array],
    patches_NC: UInt8[Array, "N C"],
    grid: Grid,
    kernels: Kernels = Kernels(),
) -> Float[Array, "P M O"]:
    """Return the tokens of an image, row after row of the merged grid.

    ``patches_NC`` has the pixels of each patch, in blocks of 2 x 2 patches; ``grid`` are rows and columns
    of patches. What stands behind the image's end means nothing.
    """
    places = patch_places(grid, patches_NC.shape[0])
    once = whole(tower.once, w.once)
    x_ND = _embedded(once, patches_NC) + resampled(once.positions, tower.side, grid, places)
    turn = _rotation(tower, places)
    attention = partial(
        _attention, tower, turn=turn, attend=partial(attend, kernels, count=grid[0] * grid[1])
    )

    kept = [
        tower.deep.index(number) if number in tower.deep else len(tower.deep) for number in range(tower.depth)
    ]

    def run(
        carry: tuple[Array, Array], inputs: tuple[Named[Array], Array]
    ) -> tuple[tuple[Array, Array], None]:
        (x_ND, outputs_KND), (block, slot) = carry, inputs
        block = whole(tower.block, block)
        x_ND = attention(block, x_ND)
        h_ND = _norm(x_ND, block, "mlp_norm")
        h_NF = _gelu(_linear(h_ND, block, "up"), is_tanh=True)
        x_ND = x_ND + _linear(h_NF, block, "down")
        return (x_ND, lax.dynamic_update_index_in_dim(outputs_KND, x_ND, slot, 0)), None

    # The outputs of blocks with a deep merger; all others leave theirs in the last place.
    outputs_KND = jnp.broadcast_to(x_ND[None], (tower.planes, *x_ND.shape))
    (x_ND, outputs_KND), _ = lax.scan(run, (x_ND, outputs_KND), (w.blocks, jnp.array(kept)))
    planes = [_merged(once, _joined(_norm(x_ND, once, "norm")))]
    for number in range(len(tower.deep)):
        merger = jax.tree.map(lambda leaf, number=number: leaf[number], w.deep)
        merger = whole(tower.deep_merger, merger)
        planes.append(_merged(merger, _norm(_joined(outputs_KND[number]), merger, "norm")))
    return jnp.stack(planes)


def _embedded(w: Named[Array], patches_NC: Array) -> Array:
    """Apply the patch kernel. Both frames are the same picture, so their kernels are added."""
    pixel = (np.arange(256, dtype=np.float32) * np.float32(1 / 255) - np.float32(MEAN)) / np.float32(STD)
    values_NC = jnp.asarray(pixel, w.patch.dtype)[patches_NC.astype(jnp.int32)]
    kernel_DC = jnp.sum(w.patch, axis=2, dtype=jnp.float32).reshape(-1, PATCH_NUMBERS)
    x_ND = product("NC,DC->ND", values_NC, kernel_DC.astype(w.patch.dtype))
    return x_ND.astype(w.patch.dtype) + w.patch_bias[None]


def _rotation(tower: Tower, places: tuple[Array, Array]) -> tuple[Array, Array]:
    """Return cosines and sines [N, 1, E / 2]: half of the pairs turn with the row, half with the column."""
    half = tower.head_width // 2
    frequency = (THETA ** (-np.arange(0, half, 2) / half)).astype(np.float32)
    angles = [place_N.astype(jnp.float32)[:, None] * frequency[None] for place_N in places]
    angle_NR = jnp.concatenate(angles, axis=-1)
    return jnp.cos(angle_NR)[:, None], jnp.sin(angle_NR)[:, None]


def _turned(x_NHE: Array, turn: tuple[Array, Array]) -> Array:
    (cos, sin), (first, second) = turn, jnp.split(x_NHE.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], -1).astype(x_NHE.dtype)


def _attention(
    tower: Tower,
    block: Named[Array],
    x_ND: Array,
    *,
    turn: tuple[Array, Array],
    attend: Callable[[Array, Array, Array], Array],
) -> Array:
    """Run attention among all patches of the image, with its residual."""
    qkv_N3HE = _linear(_norm(x_ND, block, "attention_norm"), block, "qkv").reshape(
        -1, 3, tower.heads, tower.head_width
    )
    q_NHE, k_NHE, v_NHE = (qkv_N3HE[:, part] for part in range(3))
    y_NHE = attend(_turned(q_NHE, turn), _turned(k_NHE, turn), v_NHE)
    return x_ND + _linear(y_NHE.reshape(x_ND.shape), block, "o")


def _linear(x: Array, w: Named[Array], name: str) -> Array:
    return product("NI,IO->NO", x, w[name]).astype(x.dtype) + w[f"{name}_bias"][None]


def _norm(x: Array, w: Named[Array], name: str) -> Array:
    """Apply a layer norm (Ba et al. 2016), in fp32."""
    y = x.astype(jnp.float32)
    y = y - jnp.mean(y, axis=-1, keepdims=True)
    y = y * lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + EPS)
    scale, shift = (w[each].astype(jnp.float32)[None] for each in (name, f"{name}_bias"))
    return (y * scale + shift).astype(x.dtype)


def _joined(x_ND: Array) -> Array:
    """Put the vectors of each 2 x 2 patches side by side."""
    return x_ND.reshape(-1, MERGED * x_ND.shape[1])


def _merged(w: Named[Array], x_MI: Array) -> Array:
    return _linear(_gelu(_linear(x_MI, w, "up"), is_tanh=False), w, "down")


def _gelu(x: Array, *, is_tanh: bool) -> Array:
    """Apply GELU (Hendrycks and Gimpel 2016), exactly or by tanh, in fp32."""
    return jax.nn.gelu(x.astype(jnp.float32), approximate=is_tanh).astype(x.dtype)
