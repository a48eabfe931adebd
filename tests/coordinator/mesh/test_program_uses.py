import asyncio

import pytest

from spmd_tx.coordinator.mesh import program_uses
from spmd_tx.coordinator.mesh.program_orders import ProgramOrders, ProgramRequest
from spmd_tx.coordinator.mesh.program_uses import ProgramUses, distance
from spmd_tx.protocol.programs import ProgramShape


def forward(length, **more):
    return ProgramShape(step="forward", rows=1, row_length=length, **more)


def prefill(length, **more):
    return ProgramShape(step="prefill", rows=1, row_length=length, **more)


MENU = [forward(length) for length in (16, 64, 256, 1024)] + [prefill(length) for length in (64, 256, 1024)]


def compiled(orders, count):
    """The next programs that are compiled ahead, one after the other."""
    found = []
    for _ in range(count):
        order = orders.next_order()
        orders.settled(order, 1.0, None)
        found.append(order.program)
    return found


async def written(uses):
    keeping = asyncio.create_task(uses.keep())
    await asyncio.sleep(0)
    keeping.cancel()
    await asyncio.gather(keeping, return_exceptions=True)


async def test_what_was_used_before_the_start_is_compiled_first_the_most_used_at_the_head(tmp_path):
    before = ProgramUses(tmp_path / "uses.json")
    for program in [forward(256), prefill(1024), prefill(1024), forward(9999)]:
        before.note(program)
    await written(before)
    orders = ProgramOrders(MENU, uses=ProgramUses(tmp_path / "uses.json"))
    assert compiled(orders, 4) == [prefill(1024), forward(256), forward(16), forward(64)]
    assert orders.progress.planned == len(MENU)  # a program that no command has any more is not compiled


async def test_rare_programs_that_were_used_join_the_menu(tmp_path):
    uses = ProgramUses()
    rare = forward(64, sequences=True)
    for program in (rare, forward(77, sequences=True)):
        uses.note(program)
    orders = ProgramOrders(MENU, uses=uses)
    assert (compiled(orders, 1), orders.progress.planned) == ([rare], len(MENU) + 1)


async def test_old_uses_count_less_with_every_start(tmp_path):
    for program in [forward(256)] * 5, [], [forward(64)] * 2:
        uses = ProgramUses(tmp_path / "uses.json")
        for each in program:
            uses.note(each)
        uses._is_written = False
        await written(uses)
    assert ProgramUses(tmp_path / "uses.json").in_order(MENU)[:2] == [forward(64), forward(256)]


def test_the_neighbours_of_what_is_used_now_come_before_the_rest():
    orders = ProgramOrders(MENU)
    wanted = prefill(1024)
    orders.update_awaited([ProgramRequest(wanted, "alice")])
    orders.settled(orders.next_order(), 1.0, None)
    orders.note_use(wanted)
    orders.update_awaited([])
    assert compiled(orders, 3) == [prefill(256), forward(16), forward(64)]


@pytest.mark.parametrize(
    "one, other, apart",
    [
        (forward(64), forward(64), 0.0),
        (forward(64), forward(256), 2.0),
        (forward(64), prefill(64), float("inf")),
        (prefill(64), prefill(64, logprobs=True), 1.0),
        (prefill(64), prefill(64, table=4), float("inf")),
    ],
)
def test_the_distance_of_two_programs(one, other, apart):
    assert distance(one, other) == distance(other, one) == apart


@pytest.mark.parametrize("content", [b"", b"[", b'[{"program": {"step": "dance"}, "count": 1}]'])
def test_a_damaged_file_is_ignored(tmp_path, content, caplog):
    (tmp_path / "uses.json").write_bytes(content)
    assert ProgramUses(tmp_path / "uses.json").in_order(MENU) == MENU
    assert "ignored" in caplog.text


async def test_the_file_is_written_while_the_server_runs(tmp_path, monkeypatch):
    monkeypatch.setattr(program_uses, "WRITE_SECONDS", 0.01)
    uses = ProgramUses(tmp_path / "uses.json")
    keeping = asyncio.create_task(uses.keep())
    uses.note(forward(64))
    while not (tmp_path / "uses.json").exists():
        await asyncio.sleep(0.01)
    keeping.cancel()
    await asyncio.gather(keeping, return_exceptions=True)
    assert ProgramUses(tmp_path / "uses.json").in_order(MENU)[0] == forward(64)


async def test_a_disk_that_cannot_be_written_costs_nothing_else(tmp_path, caplog):
    uses = ProgramUses(tmp_path / "missing" / "uses.json")
    uses.note(forward(64))
    await written(uses)
    assert "cannot write" in caplog.text
