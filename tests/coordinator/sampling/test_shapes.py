"""There are few shapes, and no request needs another one."""

import pytest

from spmd_tx.coordinator.sampling.shapes import SamplingShapes, decode_steps, power_of_four
from spmd_tx.protocol.commands import active_sizes

BANK_SLOTS = 10
MENUS = [
    SamplingShapes(shards, context, page_size, rows, on_cpu=on_cpu)
    for shards, context, page_size, rows in [
        (1, 2048, 16, 64),
        (8, 32768, 16, 64),
        (2, 700, 15, 13),
        (1, 40, 16, 1),
    ]
    for on_cpu in (False, True)
]


def menu_name(menu):
    where = ", on CPUs" if menu.on_cpu else ""
    return f"{menu.shards} x {menu.context}, pages of {menu.page_size}{where}"


@pytest.mark.parametrize("menu", MENUS, ids=menu_name)
def test_every_chunk_of_every_prompt_has_a_size(menu):
    sizes = {(length, table) for rows, length, table in menu.prefills() if rows == menu.shards}
    for length in range(1, menu.context):
        first = 0
        while first < length:
            end = menu.end_of_chunk(first, length)
            row_length = menu.row_length(end - first)
            table = menu.table if first else 0
            assert (row_length, table) in sizes
            assert row_length >= end - first
            assert not first or table * menu.page_size >= end
            first = end


@pytest.mark.parametrize("menu", MENUS, ids=menu_name)
def test_every_prompt_behind_every_cached_page_has_a_size(menu):
    sizes = {(length, table) for _, length, table in menu.prefills()}
    for first in range(menu.page_size, menu.context, menu.page_size):
        for length in (1, 65, 300, menu.context):
            end = menu.end_of_chunk(first, min(first + length, menu.context - 1))
            row_length = menu.row_length(max(1, end - first))
            assert (row_length, menu.table) in sizes


@pytest.mark.parametrize("menu", MENUS, ids=menu_name)
def test_every_decode_has_a_size(menu):
    sizes = set(menu.decodes(BANK_SLOTS))
    for count in range(1, menu.decode_rows + 1):
        rows = menu.rows_of_decode(count) * menu.shards
        assert rows >= count
        for used in range(1, min(count * menu.shards, BANK_SLOTS) + 1):
            active = next(size for size in menu.active_sizes(rows, BANK_SLOTS) if size >= used)
            assert (rows, active) in sizes


@pytest.mark.parametrize("shards, decodes", [(1, 15), (8, 18)])
@pytest.mark.parametrize("context", [2048, 32768])
def test_there_are_few_sizes_for_every_context(context, shards, decodes):
    menu = SamplingShapes(shards=shards, context=context, page_size=16, decode_rows=128)
    assert len(set(menu.prefills())) == len(menu.prefills()) <= 14
    assert len(set(menu.decodes(BANK_SLOTS))) == len(menu.decodes(BANK_SLOTS)) == decodes


@pytest.mark.parametrize("context", [2048, 32768, 131072])
def test_on_cpus_there_are_as_many_sizes_for_every_context(context):
    menu = SamplingShapes(shards=1, context=context, page_size=16, decode_rows=128, on_cpu=True)
    assert len(menu.prefills()) == 6
    assert len(menu.decodes(BANK_SLOTS)) == 11


def test_on_cpus_a_prefill_has_as_many_rows_as_it_uses():
    menu = SamplingShapes(shards=1, context=2048, page_size=16, decode_rows=128, on_cpu=True)
    assert [menu.rows_of_prefill(count) for count in (0, 1, 5, 16)] == [1, 1, 5, 16]
    assert menu.may_prefill(16, 64)
    assert not menu.may_prefill(17, 64)


def test_no_row_is_longer_than_a_short_context_needs():
    assert SamplingShapes(1, context=40, page_size=16, decode_rows=1).row_lengths == [64]
    assert SamplingShapes(1, context=300, page_size=16, decode_rows=1).row_lengths == [64, 256, 1024]


@pytest.mark.parametrize(
    "first, end, cut", [(0, 5000, 1024), (16, 5000, 1024), (1024, 1030, 1030), (1024, 5000, 2048)]
)
def test_chunks_end_at_multiples_of_their_size(first, end, cut):
    assert SamplingShapes(1, 8192, 16, 64).end_of_chunk(first, end) == cut


def test_few_rows_use_few_adapters():
    assert active_sizes(1, BANK_SLOTS) == [1]
    assert active_sizes(4, BANK_SLOTS) == [1, 4]
    assert active_sizes(64, BANK_SLOTS) == [1, 4, 10]
    assert active_sizes(64, 3) == [1, 3]


def test_a_large_bank_is_not_read_for_a_few_adapters():
    assert active_sizes(64, 66) == [1, 4, 8, 16, 32, 66]
    assert active_sizes(16, 66) == [1, 4, 8, 16]
    assert active_sizes(64, 18) == [1, 4, 8, 18]
    assert active_sizes(64, 10) == [1, 4, 10], "8 would save little"


@pytest.mark.parametrize(
    "most, sizes",
    [(128, [1, 4, 16, 32, 64, 128]), (100, [1, 4, 16, 32, 64, 100]), (13, [1, 4, 13]), (1, [1])],
)
def test_one_row_and_the_most_are_among_the_sizes_of_a_decode(most, sizes):
    assert SamplingShapes(1, 64, 16, decode_rows=most).decode_sizes == sizes


def test_sizes_grow_by_a_factor_of_four():
    assert [power_of_four(count) for count in (1, 2, 4, 5, 64, 65)] == [1, 4, 4, 16, 64, 256]


def test_who_waits_for_a_decode_waits_for_few_steps():
    assert decode_steps(9, 16, is_hurried=False) == 9
    assert decode_steps(1, 16, is_hurried=False) == 4
    assert decode_steps(9, 16, is_hurried=True) == 4
