"""Page tables on the devices are what the coordinator has, whatever rows come, go and change places."""

import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from spmd_tx.protocol.commands import Decode
from spmd_tx.sharding.mesh import DATA, make_mesh
from spmd_tx.sharding.transfer import rows_to_devices
from spmd_tx.sharding.weight import Weight
from spmd_tx.worker.programs import tables
from spmd_tx.worker.programs.tables import table_changes
from spmd_tx.worker.steps.pages import make_place_tables

SHARDS, ROWS, WIDTH = 2, 5, 12
OPTIONAL = "top", "active", "block", "forced"


@pytest.fixture
def few_entries(monkeypatch):
    """Calls that take few entries, so that a command needs several."""
    monkeypatch.setattr(tables, "TABLE_ENTRIES", 8)


def decode(**fields):
    """A Decode with these fields, and nothing in the others."""
    arrays = {name: np.asarray(values, np.int32) for name, values in fields.items()}
    others = dict.fromkeys((set(Decode.__struct_fields__) - set(OPTIONAL)) - arrays.keys(), np.zeros(0))
    return Decode(**others | {"steps": 1} | arrays)


def command(random, rows, known):
    """A Decode of so many rows of each data shard; ``known`` has the last one's tables, and gets its own."""
    source, places, counts, pages, after = [], [], [], [], []
    for shard in range(SHARDS):
        of_shard = []
        for _ in range(rows):
            goes_on = known[shard] and random.random() < 0.7
            number = int(random.integers(len(known[shard]))) if goes_on else -1
            before = known[shard][number] if goes_on else []
            new = random.integers(1, 100, random.integers(0, 3 if goes_on else WIDTH)).tolist()
            new = new[: WIDTH - len(before)]
            source.append(number)
            places.append(len(before))
            counts.append(len(new))
            pages += new
            of_shard.append([*before, *new])
        after.append(of_shard)
    known[:] = after
    return decode(source=source, page_places=places, page_counts=counts, pages=pages)


def test_tables_follow_the_commands(few_entries):
    mesh, random = make_mesh(SHARDS, 1, 1), np.random.default_rng(0)
    declared = Weight((SHARDS * ROWS, WIDTH), P(DATA), jnp.int32)
    place = make_place_tables(mesh, declared)
    held = rows_to_devices(mesh, np.zeros(declared.shape, np.int32))
    known, calls = [[] for _ in range(SHARDS)], []
    for _ in range(30):
        sent = command(random, int(random.integers(1, ROWS + 1)), known)
        changes = list(table_changes(sent, SHARDS, ROWS))
        calls.append(len(changes))
        for source, entries in changes:
            held = place(held, *rows_to_devices(mesh, (source, entries)))
        found = np.asarray(held).reshape(SHARDS, ROWS, WIDTH)
        for shard, of_shard in enumerate(known):
            for row, table in enumerate(of_shard):
                assert found[shard, row, : len(table)].tolist() == table
    assert max(calls) > 2


def test_rows_that_stay_and_get_nothing_cost_no_call():
    same = [0, 1, -1, 0, 1, 2]
    sent = decode(source=same, page_places=[3] * 6, page_counts=[0] * 6, pages=[])
    assert list(table_changes(sent, SHARDS, ROWS)) == []
