"""A request's results do not depend, in any bit, on whose rows are in the same micro-batch.

Programs are compiled as a server does; test_company_quickly.py has more of them without optimizations.
"""

from dataclasses import replace

import jax
import numpy as np
import pytest

from tests.support.tiny_engine import (
    ROWS,
    deal,
    mesh_name,
    named_factors,
    random_adapters,
    random_datum,
    several_targets,
    slot_of,
    tiny_engine,
)

OURS, SECOND, THIRD, BROKEN = 1, 0, 2, 3  # slots; free rows say slot 0 as well


def request(slot: int, seed: int, rows: int, loss: str):
    """Rows of one request: some of one datum, some of two, some padded."""
    lengths = [(64,), (40, 24), (24,)]
    return [
        tuple(
            random_datum(100 * seed + 10 * row + i, slot, length, loss)
            for i, length in enumerate(lengths[row % 3])
        )
        for row in range(rows)
    ]


A = request(OURS, 1, 3, "importance_sampling")
B = request(SECOND, 2, 2, "cross_entropy")
C = request(THIRD, 3, 1, "ppo")
D = request(BROKEN, 4, 2, "cross_entropy")


def of_sequences(rows):
    """The rows as gspo's."""
    masked = [
        tuple(replace(datum, loss="gspo", ratio_mask=np.ones(len(datum.tokens))) for datum in row)
        for row in rows
    ]
    return [tuple(replace(datum, clip=(0.1, 10.0)) for datum in row) for row in masked]


def with_targets(rows):
    """The rows with four targets per position."""
    return [tuple(several_targets(datum, 4, seed=len(datum.tokens)) for datum in row) for row in rows]


def with_a_broken_adapter(w, value):
    """Slot BROKEN holds the value in one entry of every factor."""

    def spoil(leaf):
        leaf = leaf.copy()
        leaf[..., BROKEN, 0, 0] = value
        return leaf

    return jax.tree.map(spoil, w)


@pytest.fixture(
    scope="module",
    params=[
        ((2, 1, 2), "bfloat16", "dense", True),
        *(  # test_company_quickly.py has a mixture
            pytest.param(engine, marks=pytest.mark.slow)
            for engine in (
                ((1, 2, 2), "float32", "grouped"),
                ((1, 1, 1), "float32", "dense"),
                ((2, 1, 4), "bfloat16", "mixture", True),
                ((2, 1, 4), "float32", "dense", True),
                ((2, 1, 4), "float32", "dense"),
                ((2, 1, 4), "bfloat16", "dense"),
                ((1, 1, 1), "float32", "mixture"),
                ((1, 2, 2), "float32", "mixture"),
                ((1, 1, 1), "float32", "grouped"),
                ((2, 1, 4), "bfloat16", "grouped", True),
                ((1, 1, 1), "float32", "linear"),
                ((2, 1, 2), "bfloat16", "linear", True),
                ((1, 1, 1), "float32", "latent"),
                ((1, 2, 2), "bfloat16", "latent"),
            )
        ),
    ],
    ids=lambda param: "-".join([mesh_name(param[0]), *param[1:3], *(["split"] if param[3:] else [])]),
)
def engine(request):
    return tiny_engine(*request.param)


def ours(engine, w, rows):
    """(logprobs and losses of our rows, gradient of our slot)"""
    result = engine.forward_backward(w, rows)
    places = [index for index, row in enumerate(rows) if row and row[0].slot == OURS]
    outputs = {"logprobs": result.logprobs[places], "losses": result.losses[places]}
    return outputs | named_factors(slot_of(result.grad_sum, OURS))


@pytest.fixture(scope="module")
def alone(engine):
    return ours(engine, random_adapters(1, engine.model), deal(engine.data_shards, [A]))


def assert_identical(actual, expected):
    for name, value in expected.items():
        assert np.all(np.isfinite(value)), name
        assert np.array_equal(actual[name], value), name


@pytest.mark.parametrize(
    "requests", [[A, B], [B, A], [C, A, B], [B, C, A]], ids=["before", "after", "between", "after two"]
)
def test_company_changes_no_bit(engine, alone, requests):
    w = random_adapters(1, engine.model)
    assert_identical(ours(engine, w, deal(engine.data_shards, requests)), alone)


def lay(engine, *requests):
    """Rows of requests on data shards, each of which they fill before the next."""
    places = ROWS // engine.data_shards
    shards = [[] for _ in range(engine.data_shards)]
    for rows, its_shards in requests:
        for number, row in enumerate(rows):
            shards[its_shards[number // places]].append(row)
    return [row for shard in shards for row in (*shard, *[()] * (places - len(shard)))]


def test_a_request_on_one_data_shard_gives_the_same_bits_on_any(engine):
    w = random_adapters(1, engine.model)
    alone = ours(engine, w, lay(engine, (A, (0,))))
    assert any(np.any(factor) for factor in alone.values())
    for shard in range(engine.data_shards):
        others = [(D, ((shard + 1) % engine.data_shards,))] if engine.data_shards > 1 else []
        rows = lay(engine, (C, (shard,)), (A, (shard,)), *others)
        assert_identical(ours(engine, with_a_broken_adapter(w, np.nan), rows), alone)


@pytest.mark.slow
@pytest.mark.parametrize(
    "shape, kind",
    [((2, 2, 2), "mixture"), ((4, 1, 2), "dense"), ((2, 2, 2), "dense"), ((1, 4, 2), "mixture")],
)
def test_a_request_on_two_data_shards_gives_the_same_bits_on_any_pair(shape, kind):
    assert_same_on_any_pair(tiny_engine(shape, kind=kind))


def assert_same_on_any_pair(engine):
    w = random_adapters(1, engine.model)
    mine = request(OURS, 5, 4, "importance_sampling")
    company = (request(SECOND, 6, 4, "ppo"), (0, 1)), (C, (3,))
    for count in (3, 4):
        alone = ours(engine, w, lay(engine, (mine[:count], (0, 1))))
        rows = lay(engine, *company[: 5 - count], (mine[:count], (2, 3)))
        assert_identical(ours(engine, w, rows), alone)


@pytest.mark.parametrize("value", [np.nan, np.inf, 3e38], ids=str)
@pytest.mark.parametrize("requests", [[D, A], [A, D]], ids=["before", "after"])
def test_a_broken_adapter_in_company_changes_no_bit(engine, alone, requests, value):
    w = with_a_broken_adapter(random_adapters(1, engine.model), value)
    rows = deal(engine.data_shards, requests)
    assert_identical(ours(engine, w, rows), alone)
    assert not np.isfinite(engine.forward_backward(w, rows).logprobs).all()


@pytest.mark.slow
@pytest.mark.parametrize("made_special", [with_targets, of_sequences])
@pytest.mark.parametrize("shape", [(1, 1, 1), (2, 2, 2)], ids=mesh_name)
def test_company_changes_no_bit_of_special_programs(shape, made_special):
    assert_company_changes_nothing(tiny_engine(shape), made_special)


def assert_company_changes_nothing(engine, made_special):
    w = random_adapters(seed=1)
    a, b, c, d = map(made_special, (A, B, C, D))
    alone = ours(engine, w, deal(engine.data_shards, [a]))
    assert all(np.any(factor) for factor in alone.values())
    for requests in ([b, a], [c, a]):
        assert_identical(ours(engine, w, deal(engine.data_shards, requests)), alone)
    broken = with_a_broken_adapter(w, np.nan)
    assert_identical(ours(engine, broken, deal(engine.data_shards, [d, a])), alone)


def test_free_rows_between_ours_change_no_bit(engine, alone):
    spread = {
        1: [(), A[0], B[0], (), A[1], B[1], C[0], A[2]],
        2: [(), A[0], B[0], A[2], (), A[1], B[1], C[0]],
    }[engine.data_shards]
    assert len(spread) == ROWS
    assert_identical(ours(engine, random_adapters(1, engine.model), spread), alone)


def test_forward_gives_company_no_say(engine):
    w = random_adapters(1, engine.model)
    rows = {False: deal(engine.data_shards, [A]), True: deal(engine.data_shards, [B, D, A])}
    outputs = []
    for is_joined in (False, True):
        logprobs, losses = engine.forward(with_a_broken_adapter(w, np.nan), rows[is_joined])
        places = [index for index, row in enumerate(rows[is_joined]) if row and row[0].slot == OURS]
        outputs.append((logprobs[places], losses[places]))
    for mine, beside in zip(*outputs, strict=True):
        assert np.array_equal(mine, beside)
