from functools import partial
from types import SimpleNamespace

import jax.numpy as jnp
import msgspec
import pytest

from spmd_tx.models.adapters import row_sums
from spmd_tx.models.adapters.lora import Lora
from spmd_tx.models.experts import product
from spmd_tx.models.experts.factor_sums import add_by_group
from spmd_tx.models.experts.kernels import triton_sum
from spmd_tx.models.linear_attention import delta_memory
from spmd_tx.protocol.kernels import Kernels
from spmd_tx.worker.self_tests import products as expert_self_test
from spmd_tx.worker.self_tests.products import (
    ExpertSizes,
    checks_of,
    problem_of,
    problem_of_choices,
    problem_of_gpu,
    problem_of_memories,
    problem_of_product,
    problem_of_row_sums,
    problem_of_stack,
    problem_of_sums,
)
from spmd_tx.worker.self_tests.verdict import Verdict, tell_verdicts
from tests.support.kernels import kernels_of

pytestmark = pytest.mark.usefixtures("quickly_compiled")

SIZES = ExpertSizes(["reference"], experts=3, width=16, inner=8)
right = product.IMPLEMENTATIONS["reference"]


def takes_the_first_expert(x, w, experts, transposed, *rest):
    return right(x, w, jnp.zeros_like(experts), transposed, *rest)


def forgets_to_transpose(x, w, experts, transposed, *rest):
    return right(x, w.swapaxes(1, 2).reshape(w.shape) if transposed else w, experts, transposed, *rest)


def adds_what_stands_beside(x, w, experts, transposed, *rest):
    beside = 1 + 0.01 * jnp.sign(jnp.roll(x, 1, 0)[:, :1]).astype(x.dtype)
    return right(x, w, experts, transposed, *rest) * beside


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    monkeypatch.setattr(expert_self_test, "TILE", 8)


def test_the_reference_passes():
    assert problem_of_product(Kernels(), SIZES) is None


@pytest.mark.parametrize("encoding", expert_self_test.ENCODINGS)
def test_it_passes_with_packed_experts(encoding):
    packed = ExpertSizes(["reference"], experts=3, width=64, inner=8, encoding=encoding, group=32)
    assert problem_of_product(Kernels(), packed) is None


@pytest.mark.parametrize(
    "wrong, problem",
    [
        (takes_the_first_expert, "the product is off by"),
        (forgets_to_transpose, "the transposed product is off by"),
        (adds_what_stands_beside, "the product of a row depends on its place, or on other rows"),
    ],
    ids=lambda x: getattr(x, "__name__", ""),
)
def test_what_is_wrong_is_noticed(wrong, problem, monkeypatch):
    monkeypatch.setitem(product.IMPLEMENTATIONS, "reference", wrong)
    assert str(problem_of_product(Kernels(), SIZES)).startswith(problem)


def right_map(slots, scales, apply_lora, *, interpret, layer_of=lambda layer: layer, mixed=0.0):
    def apply(x, w, lora, layer):
        layer = layer_of(layer)
        low = apply_lora(x[:, None], Lora(lora.a[layer], lora.b[layer]))[:, 0]
        return (x @ w[layer] + low) * (1 + mixed * x[-1:, :1])

    return apply


@pytest.mark.parametrize(
    "wrong, problem",
    [
        ({}, "None"),
        ({"layer_of": lambda layer: 0}, "the map of 1 rows with stacked matrices is off by"),
        ({"mixed": 0.1}, "the map of 16 rows with stacked matrices depends on other rows"),
    ],
    ids=["right", "takes_the_first_layer", "mixes_rows"],
)
def test_what_is_wrong_with_a_stack_is_noticed(wrong, problem, monkeypatch):
    monkeypatch.setattr(expert_self_test, "stacked_maps", partial(right_map, **wrong))
    assert str(
        problem_of_stack(Kernels(), ExpertSizes(["reference"], experts=3, width=16, inner=32))
    ).startswith(problem)


def forgets_what_was_added_before(kernels, sums, *blocks):
    return add_by_group(kernels, jnp.zeros_like(sums), *blocks)


def adds_one_block_more(kernels, sums, low, wide, spans):
    return add_by_group(kernels, sums, low, wide, (spans[0], spans[1] + 1))


def adds_what_stands_first(kernels, sums, low, wide, spans):
    return add_by_group(kernels, sums, low, wide, spans) * (1 + 0.001 * wide[:1, :1, :1])


@pytest.mark.parametrize(
    "wrong, problem",
    [
        (add_by_group, "None"),
        (forgets_what_was_added_before, "the sum of factors' gradients is off by"),
        (adds_one_block_more, "the sum of factors' gradients is off by"),
        (adds_what_stands_first, "the sum of factors' gradients depends on other adapters or experts"),
    ],
    ids=lambda x: getattr(x, "__name__", ""),
)
def test_what_is_wrong_with_sums_is_noticed(wrong, problem, monkeypatch):
    monkeypatch.setattr(expert_self_test, "add_by_group", wrong)
    sizes = ExpertSizes(["reference"], experts=3, width=16, inner=32, dtype="float32")
    assert str(problem_of_sums(kernels_of("triton"), sizes)).startswith(problem)


def adds_all_places(y, place, *rest):
    return triton_sum(y, jnp.maximum(place, 0), *rest)


def adds_from_the_last_on(y, place, *rest):
    return triton_sum(y, place[:, ::-1], *rest)


@pytest.mark.parametrize(
    "wrong, problem",
    [
        (triton_sum, "None"),
        (adds_all_places, "the sum of a token's experts is off by"),
        (adds_from_the_last_on, "the sum of a token's experts is off by"),
    ],
    ids=lambda x: getattr(x, "__name__", ""),
)
def test_what_is_wrong_with_sums_of_choices_is_noticed(wrong, problem, monkeypatch):
    monkeypatch.setattr(expert_self_test, "triton_sum", wrong)
    sizes = ExpertSizes(["reference"], experts=3, width=16, inner=32, dtype="float32")
    assert str(problem_of_choices(kernels_of("triton"), sizes)).startswith(problem)


read_token = delta_memory.read_token


def writes_nothing(q, k, v, decay, strength, where):
    return read_token(q, k, v, decay, strength, where)[0], where.pool


def takes_the_first_key_for_all_rows(q, k, v, decay, strength, where):
    return read_token(q, jnp.broadcast_to(k[:1], k.shape), v, decay, strength, where)


def adds_the_first_row(q, k, v, decay, strength, where):
    y, pool = read_token(q, k, v, decay, strength, where)
    return y + 1e-3 * y[:1], pool


@pytest.mark.parametrize(
    "wrong, problem",
    [
        (read_token, "None"),
        (writes_nothing, "the delta rule in a pool is off by"),
        (takes_the_first_key_for_all_rows, "the delta rule in a pool is off by"),
        (adds_the_first_row, "the delta rule in a pool depends on a row's place"),
    ],
    ids=lambda x: getattr(x, "__name__", ""),
)
def test_what_is_wrong_with_memories_is_noticed(wrong, problem, monkeypatch):
    monkeypatch.setattr(delta_memory, "read_token", wrong)
    sizes = ExpertSizes(["reference"], experts=3, width=16, inner=32, memory=(16, 32))
    assert str(problem_of_memories(kernels_of("triton"), sizes)).startswith(problem)


def adds_the_last_row_twice(grad, slots, *rest):
    return right_sums(grad, slots, *rest).at[slots[-1]].add(grad[-1].astype(jnp.float32))


def adds_what_others_have(grad, slots, *rest):
    return right_sums(grad, slots, *rest) + 1e-3 * jnp.max(grad.astype(jnp.float32))


right_sums = row_sums.IMPLEMENTATIONS["reference"]


def test_the_reference_adds_rows_right():
    assert problem_of_row_sums(Kernels(), SIZES) is None


@pytest.mark.parametrize(
    "wrong, problem",
    [
        (adds_the_last_row_twice, "the sum of rows' gradients is off by"),
        (adds_what_others_have, "the sum of rows' gradients depends on their places, or on other rows"),
    ],
    ids=lambda x: getattr(x, "__name__", ""),
)
def test_what_is_wrong_with_sums_of_rows_is_noticed(wrong, problem, monkeypatch):
    monkeypatch.setitem(row_sums.IMPLEMENTATIONS, "mosaic", wrong)
    assert str(problem_of_row_sums(kernels_of("mosaic"), SIZES)).startswith(problem)


@pytest.mark.parametrize(
    "name, is_mixture, expected",
    [
        ("mosaic", False, {"sums of rows"}),
        ("mosaic", True, {"sums of rows", "products of experts", "products with factors of experts"}),
        (
            "mosaic_gpu",
            False,
            {"the GPU itself", "sums of rows", "products with stacked layers", "memories of linear layers"},
        ),
        (
            "triton",
            False,
            {"sums of rows", "products with stacked layers", "memories of linear layers"},
        ),
        (
            "triton",
            True,
            {
                "sums of rows",
                "products of experts",
                "products with factors of experts",
                "sums of factors of experts",
                "sums of a token's experts",
                "products with stacked layers",
                "memories of linear layers",
            },
        ),
    ],
)
def test_a_platforms_kernels_are_checked_as_far_as_a_model_uses_them(name, is_mixture, expected):
    sizes = ExpertSizes(["reference"], experts=3, width=16, inner=8, is_mixture=is_mixture)
    assert checks_of(kernels_of(name), sizes).keys() == expected


@pytest.mark.parametrize(
    "capability, problem",
    [("9.0", None), ("10.0", None), ("8.0", "it is for GPUs of other"), ("12.0", "it is for GPUs of other")],
)
def test_mosaic_gpu_is_tried_only_on_gpus_for_which_it_compiles(capability, problem, monkeypatch):
    device = SimpleNamespace(compute_capability=capability)
    monkeypatch.setattr(expert_self_test.jax, "local_devices", lambda: [device])
    found = problem_of_gpu(0)
    assert found is None if problem is None else str(found).startswith(problem)


def test_the_kernels_of_this_platform_get_one_verdict(capsys):
    tell_verdicts(msgspec.json.encode(SIZES).decode(), ExpertSizes, problem_of)
    verdict = msgspec.json.decode(capsys.readouterr().out.encode(), type=Verdict)
    assert (verdict.implementation, verdict.problem) == ("reference", None)
