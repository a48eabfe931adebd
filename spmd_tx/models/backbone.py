"""The forward pass of a declared model.

Runs inside shard_map. Training, prefill and decode share this code; they pass in how to attend and how to
apply adapters. Layers that are alike run in one loop.

Dimension key: B row, T token, D model width, H heads × head width, F feed-forward width, L layer,
V vocabulary, N heads, K key-value heads, E head width, X expert, C choice of an expert, I input width,
O output width.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Float, Int

from spmd_tx.models.adapters import lora
from spmd_tx.models.adapters.lora import Adapters
from spmd_tx.models.attention import latent as latent
from spmd_tx.models.attention.rope import grow_queries, rotate
from spmd_tx.models.base_weights import Weights
from spmd_tx.models.checkpoint.packed import Packed
from spmd_tx.models.declared.channels import Mixture
from spmd_tx.models.declared.delta_rule import DeltaRule
from spmd_tx.models.declared.latent import Latent
from spmd_tx.models.declared.layers import Cycle, Norm, StackPlace
from spmd_tx.models.declared.mixers import Softmax
from spmd_tx.models.declared.model import Model
from spmd_tx.models.experts import moe
from spmd_tx.models.feed_forward import experts_of, feed_forward
from spmd_tx.models.forward_pass import Pass
from spmd_tx.models.gates import open_by, query_and_gate
from spmd_tx.models.layer_pass import LayerPass, norm
from spmd_tx.models.layers import embed, rms_norm
from spmd_tx.models.linear_attention import state_pool
from spmd_tx.models.linear_attention.delta_layer import mix
from spmd_tx.models.linear_attention.state_pool import Keep
from spmd_tx.models.named import Named
from spmd_tx.models.remat import rematerialised
from spmd_tx.models.stack_product import reads_stack
from spmd_tx.models.vision.image_tokens import image_tokens
from spmd_tx.sharding.collectives import gather_inputs, varying
from spmd_tx.sharding.mesh import EP, FSDP, TP


def backbone(
    model: Model,
    base: Weights[Array],
    adapters: Adapters[Array],
    tokens_BT: Int[Array, "B T"],
    positions_BT: Int[Array, "B T"],
    how: Pass,
    cache: Any = None,
) -> tuple[Float[Array, "B T D"], Any, Int[Array, "B T L C"] | None]:
    """Return hidden states after the final norm (all T on every device), cache and chosen experts.

    Layers without experts choose expert 0 each time, where others have experts.
    """
    x_BTD = embed(base.embed, tokens_BT, model.d_model)
    if base.images is not None:
        of_images = partial(image_tokens, base.images, tokens_BT - model.vocab_size)
        how, x_BTD = replace(how, of_images=of_images), x_BTD + of_images(0)
    x_BTD = how.reduce(x_BTD)
    replayed_LBTC = None if how.experts is None else jnp.moveaxis(how.experts, 2, 0)
    layers = base.layers
    if how.remat is not None:  # marked within the loop, each would be a new array, and "none" would keep it
        layers = jax.tree.map(lambda w: varying(w, FSDP, EP), layers)
    carry, places, chosen = (x_BTD, cache), list(model.places), list[Array]()
    for cycle in model.stack:
        its_own = places[: len(cycle.layers)]
        del places[: len(cycle.layers)]
        stacks = [_stacked(model, place, base, adapters, tokens_BT.shape[0], how) for place in its_own]
        run = _run_cycle(model, its_own, stacks, adapters, positions_BT, how)
        if how.remat is not None:
            run = rematerialised(run, how.remat)
        xs = tuple(
            _inputs(model, place, layers, adapters, replayed_LBTC, stack)
            for place, stack in zip(its_own, stacks, strict=True)
        )
        carry, choices = lax.scan(run, carry, xs)
        if model.n_experts:
            chosen.append(_in_order(cycle, choices, (*tokens_BT.shape, model.experts_per_token)))
    x_BTD, cache = carry
    choices_LBTC = jnp.concatenate(chosen) if len(chosen) > 1 else chosen[0] if chosen else None
    choices_BTLC = None if choices_LBTC is None else jnp.moveaxis(choices_LBTC, 0, 2)
    h_BTD = how.gather(norm(x_BTD, base.final_norm, model.norm))
    return h_BTD, cache, choices_BTLC


def _inputs(
    model: Model,
    place: StackPlace,
    layers: Named[Array],
    adapters: Adapters[Array],
    replayed_LBTC: Array | None,
    stack: moe.Matrices,
) -> tuple[Any, ...]:
    """Return what the loop takes for a place of a cycle, with a leading dimension of the repetitions."""
    w = layers.part(place.prefix).without(stack)
    factors = Named(adapters.layers).part(place.prefix)
    numbers = place.numbers
    index = jnp.arange(len(numbers))
    if (kept := model.kept_numbers(place)) != tuple(numbers):
        index = jnp.array(kept)
    elif numbers != range(len(numbers)):
        index = numbers.start + numbers.step * index
    if replayed_LBTC is not None and len(numbers) < replayed_LBTC.shape[0]:
        replayed_LBTC = replayed_LBTC[numbers.start : numbers.stop : numbers.step]
    factors = factors.without(_dense(stack))
    return w, factors, index, replayed_LBTC, jnp.arange(len(numbers)) if stack else None


def _stacked(
    model: Model, place: StackPlace, base: Weights[Array], adapters: Adapters[Array], rows: int, how: Pass
) -> moe.Matrices:
    """Return the matrices of all repetitions that are read where they are stacked."""
    channel, w = place.layer.channel, base.layers.part(place.prefix)
    found: moe.Matrices = {}
    if isinstance(channel, Mixture) and moe.reads_stack(w.up, model.d_model, channel.experts, how):
        found |= experts_of(w)
    tp = lax.axis_size(TP)
    factors = Named(adapters.layers).part(place.prefix)
    for name in () if how.stacked_map is None else factors:
        is_whole = w[name].shape[1:] == lora.local_widths(model, place.name(name), tp)
        if is_whole and not isinstance(w[name], Packed) and reads_stack(w[name].shape, rows):
            found[name] = w[name]
    return found


def _dense(stack: moe.Matrices) -> list[str]:
    """Return the names of matrices that are read in place, but for those of experts."""
    return [name for name, each in stack.items() if each.ndim == 3 and not name.endswith("_bias")]


def _run_cycle(
    model: Model,
    places: list[StackPlace],
    stacks: list[moe.Matrices],
    adapters: Adapters[Array],
    positions_BT: Array,
    how: Pass,
) -> Callable[..., Any]:
    """Make the body of a loop over the repetitions of a cycle."""
    whole = [
        {name: Named(adapters.layers)[place.name(name)] for name in _dense(stack)}
        for place, stack in zip(places, stacks, strict=True)
    ]

    def run(carry: tuple[Array, Any], inputs: tuple[Any, ...]) -> Any:
        x_BTD, cache = carry
        chosen = list[Array | None]()
        for place, stack, its_whole, one in zip(places, stacks, whole, inputs, strict=True):
            w, factors, index, replayed_BTC, number = one
            lora = how.take_factors(factors).with_(its_whole)
            layer = LayerPass(model, place, how.take_weights(place, w), lora, how, stack, number)
            run_mixer = MIXERS[type(place.layer.mixer)]
            x_BTD, cache = run_mixer(layer, x_BTD, positions_BT, index, cache)
            x_BTD, choices_BTC = feed_forward(layer, x_BTD, replayed_BTC)
            if place.layer.adds_image and how.of_images is not None:
                x_BTD = x_BTD + how.reduce(how.of_images(1 + index))
            chosen.append(choices_BTC)
        return (x_BTD, cache), tuple(chosen)

    return run


def _in_order(cycle: Cycle, choices: tuple[Array | None, ...], shape: tuple[int, ...]) -> Array:
    """Return the choices of a cycle's layers in their order [L, B, T, C]."""
    if len(choices) == 1 and choices[0] is not None:
        return choices[0]
    nothing = jnp.zeros((cycle.repeats, *shape), jnp.int32)
    stacked = jnp.stack([nothing if each is None else each for each in choices], axis=1)
    return stacked.reshape(-1, *shape)


def attention(
    layer: LayerPass, x_BTD: Array, positions_BT: Array, index: Array, cache: Any
) -> tuple[Array, Any]:
    """Run the attention block with its residual."""
    mixer, w, tp = layer.place.layer.mixer, layer.w, lax.axis_size(TP)
    assert isinstance(mixer, Softmax)
    h_BTD = layer.norm(x_BTD, "attention_norm")
    places = positions_BT if layer.how.places is None else layer.how.places

    def heads(y: Array) -> Array:
        return y.reshape(*y.shape[:2], -1, mixer.width)

    def placed(y: Array, name: str) -> Array:
        if mixer.qk_norm:
            y = norm(y, w[f"{name}_norm"], Norm(mixer.eps, mixer.is_zero_centred))
        return y if mixer.rope is None else rotate(y, places, mixer.rope)

    q_BTH, k_BTH = (layer.how.as_computed(layer.columns(h_BTD, name)) for name in ("q", "k"))
    q_BTNE, gate_BTNE = query_and_gate(q_BTH, mixer.width) if mixer.gate else (heads(q_BTH), None)
    q_BTNE, k_BTKE = placed(q_BTNE, "q"), placed(heads(k_BTH), "k")
    v_BTKE = heads(layer.columns(h_BTD, "v"))
    if mixer.rope is not None:
        q_BTNE = grow_queries(q_BTNE, positions_BT, mixer.rope)
    if mixer.kv_heads % tp:  # every device holds all key-value heads and uses that of its query heads
        mine = lax.axis_index(TP) * mixer.kv_heads // tp
        k_BTKE, v_BTKE = (lax.dynamic_slice_in_dim(x, mine, 1, axis=2) for x in (k_BTKE, v_BTKE))
    y_BTNE, cache = _attend(layer, index, (q_BTNE, k_BTKE, v_BTKE), cache)
    if gate_BTNE is not None:
        y_BTNE = open_by(y_BTNE, gate_BTNE)
    y_BTH = y_BTNE.reshape(*y_BTNE.shape[:2], -1)
    x_BTD = x_BTD + layer.rows(y_BTH, "o")
    return checkpoint_name(x_BTD, "after_attention"), cache


def _attend(layer: LayerPass, index: Array, qkv: tuple[Array, Array, Array], cache: Any) -> tuple[Array, Any]:
    """Attend as the pass does, within the window and with the sinks of the layer."""
    mixer, sight = layer.place.layer.mixer, dict[str, Any]()
    assert isinstance(mixer, Softmax)
    if mixer.window:
        sight["window"] = mixer.window
    if mixer.sinks:
        sight["sinks_N"] = layer.w.sinks
    qkv = tuple(checkpoint_name(x, name) for x, name in zip(qkv, ("query", "key", "value"), strict=True))
    if not isinstance(cache, Keep):
        return layer.how.attend(index, *qkv, cache, **sight)
    if mixer.window:
        assert layer.how.attend_window is not None
        y_BTNE, rings = layer.how.attend_window(index, *qkv, cache.states, **sight)
        return y_BTNE, cache.replace(states=rings)
    y_BTNE, pages = layer.how.attend(index, *qkv, cache.pages, **sight)
    return y_BTNE, cache.replace(pages=pages)


def latent_attention(
    layer: LayerPass, x_BTD: Array, positions_BT: Array, index: Array, cache: Any
) -> tuple[Array, Any]:
    """Run a block of latent attention with its residual: over pages while sampling, else over whole keys."""
    mixer, w, how = layer.place.layer.mixer, layer.w, layer.how
    assert isinstance(mixer, Latent)
    h_BTD = layer.norm(x_BTD, "attention_norm")
    if mixer.q_rank:
        low_BTR = rms_norm(layer.columns(h_BTD, "q_a"), w.q_a_norm, mixer.eps)
        q_BTH = layer.columns(low_BTR, "q_b")
    else:
        q_BTH = layer.columns(h_BTD, "q")
    q_BTNE = q_BTH.reshape(*q_BTH.shape[:2], -1, mixer.query_width)
    q_BTNE = checkpoint_name(latent.place_queries(mixer, q_BTNE, positions_BT), "query")
    pages_BTC = latent.compress(mixer, layer.columns(h_BTD, "kv_a"), w.kv_a_norm, positions_BT)
    pages_BTC = checkpoint_name(pages_BTC, "key")
    kv_b_RH = gather_inputs(w.kv_b, mixer.kv_rank)
    if cache is None:
        keys, values = latent.expand(mixer, pages_BTC, kv_b_RH)
        y_BTNE, _ = how.attend(index, q_BTNE, keys, values, None, scale=mixer.scale)
    else:
        page = pages_BTC[:, :, None]
        absorbed = latent.absorb(mixer, q_BTNE, kv_b_RH)
        y_BTNE, cache = how.attend(index, absorbed, page, page, cache)
        y_BTNE = latent.expand_result(mixer, y_BTNE[..., : mixer.kv_rank], kv_b_RH)
    y_BTH = y_BTNE.reshape(*y_BTNE.shape[:2], -1)
    return checkpoint_name(x_BTD + layer.rows(y_BTH, "o"), "after_attention"), cache


def delta_rule(
    layer: LayerPass, x_BTD: Array, positions_BT: Array, index: Array, cache: Any
) -> tuple[Array, Any]:
    """Run a Gated DeltaNet layer with its residual. While sampling, ``cache`` is a Keep."""
    sizes, how, slots = layer.place.layer.mixer, layer.how, layer.how.slots
    assert isinstance(sizes, DeltaRule)
    assert how.segments is not None
    h_BTD = layer.norm(x_BTD, "attention_norm")
    before = None if slots is None else state_pool.read(cache.states, index, slots, how.kernels)
    decodes, depths_B = (False, None) if slots is None else (slots.decodes, slots.depths_B)
    where = how.segments, positions_BT, before
    y_BTI, after = mix(
        sizes, layer.w, partial(layer.columns, h_BTD), *where, decodes=decodes, depths_B=depths_B
    )
    if slots is not None:
        cache = cache.replace(states=state_pool.write(cache.states, index, slots.targets_B, after))
    return checkpoint_name(x_BTD + layer.rows(y_BTI, "out"), "after_attention"), cache


# How the layers of each kind of mixer run.
MIXERS: dict[type, Callable[..., tuple[Array, Any]]] = {
    Softmax: attention,
    Latent: latent_attention,
    DeltaRule: delta_rule,
}
