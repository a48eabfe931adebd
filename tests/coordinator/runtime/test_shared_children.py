"""A child that a hostile call has ended is replaced before others need it."""

import asyncio

import pytest

from spmd_tx.coordinator.runtime.owner_turns import OWNER
from spmd_tx.coordinator.runtime.shared_children import OutsideCall, SharedChildren
from spmd_tx.errors import ForeignCodeFailed, InvalidRequest
from spmd_tx.processes.child import Allowance
from tests.processes.test_child import FOREIGN

SECONDS = 60.0
WHO = OutsideCall(f"{FOREIGN}:surroundings", {})
ABORT = OutsideCall(f"{FOREIGN}:abort", {})


@pytest.fixture
async def children():
    children = SharedChildren(Allowance(SECONDS, memory=1 << 30), 1, 1)
    yield children
    await children.close()


async def pid_for(children, owner, preparation=None):
    OWNER.set(owner)
    return (await children.call(WHO, preparation))["pid"]


async def abort_for(children, owner, preparation=None):
    OWNER.set(owner)
    with pytest.raises(ForeignCodeFailed):
        await children.call(ABORT, preparation)


async def until_prepared(children):
    while children._preparing is not None:
        await asyncio.sleep(0.01)


async def noted(children, folder):
    """The process that was made ready."""
    await until_prepared(children)
    (file,) = folder.iterdir()
    return int(file.name)


async def test_calls_share_a_child_that_has_started(children):
    assert len({await pid_for(children, owner) for owner in "aab"}) == 1


async def test_a_child_that_has_ended_is_made_ready(children, tmp_path):
    await abort_for(children, "mallory", OutsideCall(f"{FOREIGN}:note_pid", {"folder": str(tmp_path)}))
    ready = await noted(children, tmp_path)
    assert await pid_for(children, "alice") == ready


async def test_who_has_ended_one_waits_for_another_and_leaves_the_ready_one(children, tmp_path):
    note = OutsideCall(f"{FOREIGN}:note_pid", {"folder": str(tmp_path)})
    await abort_for(children, "mallory", note)
    ready = await noted(children, tmp_path)
    assert await pid_for(children, "mallory") != ready
    await abort_for(children, "mallory", note)
    assert ready in {await pid_for(children, "alice") for _ in range(2)}


async def test_calls_go_on_while_children_end_and_get_ready(children):
    """Also if the preparation fails, and while one is under way."""
    for _ in range(3):
        await abort_for(children, "mallory", ABORT)
        assert await pid_for(children, "alice") > 0
    OWNER.set("alice")
    with pytest.raises(InvalidRequest):
        await children.call(OutsideCall(f"{FOREIGN}:refuse", {"text": "a"}))
