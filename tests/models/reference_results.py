"""What the independent reference says of datums of the tiny models."""

import functools
from dataclasses import replace
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np

from tests.models import reference
from tests.support import tiny_engine
from tests.support.tiny_engine import BOTH_SCALES, LENGTH, MODELS, Datum, slot_of

TOLERANCE = 1e-5  # relative to the largest entry of the array
LOWEST_RATIO, HIGHEST_RATIO = 0.7, 1.6


@functools.cache
def random_parameters(kind: str):
    base = tiny_engine.random_arrays(tiny_engine.tiny_engine(kind=kind).declared_base, seed=0)
    return jax.tree.map(jnp.asarray, base), tiny_engine.random_adapters(1, MODELS[kind])


@functools.partial(jax.jit, static_argnums=0)
def reference_logprobs(kind, adapter, base, scales, tokens, targets):
    return reference.logprobs(MODELS[kind], base, adapter, scales, tokens, targets)


@functools.partial(jax.jit, static_argnums=0)
def reference_gradient(kind, adapter, *others_and_cotangent):
    """Gradient of the sum of cotangent · logprob."""
    *others, cotangent = others_and_cotangent
    return jax.grad(lambda a: jnp.sum(cotangent * reference_logprobs(kind, a, *others)))(adapter)


def to_the_end(values: np.ndarray) -> np.ndarray:
    """Filled up with zeros to LENGTH, to compile once: what follows a token does not matter to it."""
    return np.pad(values, (0, LENGTH - len(values)))


def arguments(kind: str, datum: Datum):
    base, adapters = random_parameters(kind)
    tokens, targets = to_the_end(datum.tokens), to_the_end(datum.targets)
    return kind, slot_of(adapters, datum.slot), base, BOTH_SCALES[datum.slot], tokens, targets


def logprobs_of(kind: str, datum: Datum) -> np.ndarray:
    return np.asarray(reference_logprobs(*arguments(kind, datum)))[: len(datum.tokens)]


def near_the_sampler(kind: str, datum: Datum, seed: int) -> Datum:
    """The datum as if sampled from a slightly different policy: ratios fall on both sides of the clips."""
    logprobs = logprobs_of(kind, datum)
    log_ratios = np.random.default_rng(seed).uniform(
        np.log(LOWEST_RATIO), np.log(HIGHEST_RATIO), logprobs.shape
    )
    return replace(datum, sampling_logprobs=(logprobs - log_ratios).astype(np.float32))


def ignored(datum: Datum, positions: slice) -> Datum:
    """The datum with positions that do not count, and nonsense where their inputs would be."""
    weights, advantages, logprobs = (
        datum.weights.copy(),
        datum.advantages.copy(),
        datum.sampling_logprobs.copy(),
    )
    weights[positions] = advantages[positions] = 0.0
    logprobs[positions] = np.resize(
        np.array([-np.inf, np.nan, np.inf, 1e38, -1e38], np.float32), logprobs[positions].shape
    )
    return replace(datum, weights=weights, advantages=advantages, sampling_logprobs=logprobs)


def reference_datum(kind: str, datum: Datum):
    """(losses, logprobs, gradient); positions that do not count are left out, not masked."""
    counts = (datum.weights if datum.loss == "cross_entropy" else datum.advantages) != 0
    logprobs, inputs = logprobs_of(kind, datum), (datum.weights, datum.advantages, datum.sampling_logprobs)
    limits = [np.broadcast_to(np.float32(limit), counts.sum()) for limit in datum.clip]
    arrays = [to_the_end(each) for each in (logprobs[counts], *(x[counts] for x in inputs), *limits)]
    found = token_losses(datum.loss, *arrays, datum.beta, datum.kl_coeff)
    losses, cotangent = np.zeros((2, *counts.shape), np.float32)
    losses[counts], cotangent[counts] = (np.asarray(each)[: counts.sum()] for each in found)
    return losses, logprobs, reference_gradient(*arguments(kind, datum), to_the_end(cotangent))


@functools.partial(jax.jit, static_argnums=0)
def token_losses(name, logprobs, weights, advantages, sampling_logprobs, low, high, beta, kl_coeff):
    """Return the losses of tokens, and their slopes."""
    datum = SimpleNamespace(
        weights=weights,
        advantages=advantages,
        sampling_logprobs=sampling_logprobs,
        clip=(low, high),
        beta=beta,
        kl_coeff=kl_coeff,
    )
    return values_and_slopes(lambda logprobs: reference.LOSSES[name](logprobs, datum), logprobs)


def values_and_slopes(loss, logprobs):
    """Return the losses, and the gradient of their sum."""
    losses, pull_back = jax.vjp(loss, logprobs)
    return losses, pull_back(jnp.ones_like(losses))[0]


def reference_sequence(kind: str, datum: Datum):
    """The same of a loss that looks at whole sequences."""
    logprobs = logprobs_of(kind, datum)
    loss = functools.partial(reference.gspo, datum=datum)
    losses, cotangent = jax.jit(functools.partial(values_and_slopes, loss))(logprobs)
    return losses, logprobs, reference_gradient(*arguments(kind, datum), to_the_end(np.asarray(cotangent)))


def reference_targets(kind: str, datum: Datum):
    """The same of cross_entropy with several targets per position: the sum of as many datums of one."""
    count = datum.targets.shape[1]
    single = [replace(datum, targets=datum.targets[:, k], weights=datum.weights[:, k]) for k in range(count)]
    parts = [reference_datum(kind, each) for each in single]
    losses, logprobs, gradients = zip(*parts, strict=True)
    total = jax.tree.map(lambda *leaves: np.sum(leaves, axis=0), *gradients)
    return np.sum(losses, axis=0), np.stack(logprobs, axis=-1), total


def assert_close(actual: np.ndarray, wanted: np.ndarray, what: str) -> None:
    scale = np.abs(wanted).max()
    assert scale > 0, f"{what}: the reference is zero, so the test says nothing"
    assert np.abs(actual - wanted).max() <= TOLERANCE * scale, what
