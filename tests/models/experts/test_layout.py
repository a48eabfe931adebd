"""Where pairs of tokens and experts stand."""

import jax
import numpy as np
import pytest

from spmd_tx.models.experts.layout import Choices, layout

pytestmark = pytest.mark.usefixtures("quickly_compiled")

EXPERTS, LOCAL, FIRST, CHOICES, SLOTS = 16, 8, 4, 3, 3
SLOTS_OF_ROWS = np.array([2, 0, 1, 2], np.int32)


def random_choices(seed: int, rows: int = 4, length: int = 40) -> np.ndarray:
    random = np.random.default_rng(seed)
    return np.argsort(random.random((rows, length, EXPERTS)), axis=-1)[..., :CHOICES].astype(np.int32)


def placed(chosen: np.ndarray, slots=SLOTS_OF_ROWS, **sizes: bool):
    tiling = Choices(*chosen.shape, EXPERTS, LOCAL).tiling(**{"by_tile": False} | sizes)
    place = jax.jit(layout, static_argnums=(0, 3, 4))(tiling, chosen - FIRST, slots, LOCAL, SLOTS)
    return tiling, jax.tree.map(np.asarray, place)


def blocks_of(chosen: np.ndarray, tiling, place) -> dict[int, list[tuple[int, int, int]]]:
    """(row, token, expert) of every pair in each block, in order."""
    blocks: dict[int, list[tuple[int, int, int]]] = {}
    for position, pair in enumerate(np.asarray(place.pair_W)):
        if pair >= 0:
            row, token, choice = np.unravel_index(pair, chosen.shape)
            one = int(row), int(token), int(chosen[row, token, choice]) - FIRST
            blocks.setdefault(position // tiling.block, []).append(one)
    return blocks


@pytest.mark.parametrize("length", [128, 512])
def test_estimates_are_those_of_experts_that_are_chosen_equally_often(length, monkeypatch):
    monkeypatch.setattr("spmd_tx.models.experts.layout.LEAST_CHUNK", 64)
    tiling, place = placed(random_choices(5, length=length))
    assert tiling.usual_chunks > 1
    assert np.isclose(np.sum(place.place_RTC >= 0), tiling.usual_pairs, rtol=0.1)
    per_chunk, used = tiling.chunk // tiling.block, int(place.positions) // tiling.block
    chunks = np.split(place.expert_N[:used], np.arange(per_chunk, used, per_chunk))
    read = sum(np.unique(chunk).size for chunk in chunks)
    assert read <= len(chunks) * tiling.usual_experts(LOCAL) < len(chunks) * LOCAL


@pytest.mark.parametrize("by_tile", [True, False], ids=["one tile at once", "many"])
def test_every_pair_of_this_device_has_a_place_of_its_own(by_tile):
    chosen = random_choices(1)
    _, place = placed(chosen, by_tile=by_tile)
    places, pairs = np.asarray(place.place_RTC), np.asarray(place.pair_W)
    is_mine = (chosen >= FIRST) & (chosen < FIRST + LOCAL)
    assert np.array_equal(places >= 0, is_mine)
    assert np.array_equal(pairs[places[is_mine]], np.flatnonzero(is_mine))
    assert (pairs >= 0).sum() == is_mine.sum()
    assert places.max() < place.positions


@pytest.mark.parametrize("by_tile", [True, False], ids=["one tile at once", "many"])
def test_a_block_has_one_row_and_one_expert_and_a_tile_one_expert(by_tile):
    chosen = random_choices(2)
    tiling, place = placed(chosen, by_tile=by_tile)
    blocks = blocks_of(chosen, tiling, place)
    for number, pairs in blocks.items():
        assert len({(row, expert) for row, _, expert in pairs}) == 1
        row, _, expert = pairs[0]
        assert place.expert_N[number] == expert
        assert place.slot_N[number] == SLOTS_OF_ROWS[row]
        assert place.group_N[number] == expert * SLOTS + SLOTS_OF_ROWS[row]
    per_tile = tiling.tile // tiling.block
    for number, pairs in blocks.items():
        assert place.expert_N[number // per_tile * per_tile] == pairs[0][2]


def test_the_blocks_of_a_group_follow_each_other_in_the_order_of_rows_and_tokens():
    chosen = random_choices(3)
    tiling, place = placed(chosen)
    blocks = blocks_of(chosen, tiling, place)
    for group, (first, count) in enumerate(zip(place.first_G, place.count_G, strict=True)):
        pairs = [pair for number in range(first, first + count) for pair in blocks[number]]
        expert, slot = divmod(group, SLOTS)
        wanted = [
            (row, token, expert)
            for row in np.flatnonzero(slot == SLOTS_OF_ROWS)
            for token in np.flatnonzero((chosen[row] == expert + FIRST).any(axis=-1))
        ]
        assert pairs == wanted


def test_a_rows_blocks_are_the_same_in_any_company():
    ours = random_choices(4, rows=1)

    def of_row(chosen, slots, row):
        tiling, place = placed(chosen, slots)
        blocks = blocks_of(chosen, tiling, place)
        return [[pair[1:] for pair in pairs] for _, pairs in sorted(blocks.items()) if pairs[0][0] == row]

    company = random_choices(5)
    alone = of_row(np.concatenate([ours, company[:3]]), np.array([1, 1, 2, 0], np.int32), 0)
    other = of_row(np.concatenate([company[1:], ours]), np.array([0, 0, 2, 2], np.int32), 3)
    assert alone == other


@pytest.mark.parametrize("by_tile", [True, False], ids=["one tile at once", "many"])
@pytest.mark.parametrize("favourite", [FIRST, FIRST + 2])
def test_there_is_room_if_all_tokens_choose_the_same_experts(by_tile, favourite):
    chosen = np.broadcast_to(np.arange(favourite, favourite + CHOICES, dtype=np.int32), (4, 40, CHOICES))
    tiling, place = placed(chosen, by_tile=by_tile)
    assert (np.asarray(place.pair_W) >= 0).sum() == chosen.size
    assert place.positions <= tiling.positions


@pytest.mark.parametrize(
    "rows, length, local",
    [(32, 2048, 16), (64, 1024, 16), (8, 2048, 128), (16, 1024, 32), (256, 256, 16), (8, 1024, 16)],
)
def test_of_a_large_model_few_places_are_free(rows, length, local):
    """Of 128 experts a token has 8, as in Qwen3-30B-A3B; at most 1.3 times their work is done."""
    experts, choices = 128, 8
    random = np.random.default_rng(0)
    tiling = Choices(rows, length, choices, experts, local).tiling(by_tile=False)
    counts = random.binomial(length, choices / experts, (rows, local))
    blocks = np.ceil(counts / tiling.block).sum(axis=0) * tiling.block
    used = (np.ceil(blocks / tiling.tile) * tiling.tile).sum()
    computed = np.ceil(used / tiling.chunk) * tiling.chunk
    assert computed <= 1.3 * counts.sum()
    assert computed <= tiling.positions
