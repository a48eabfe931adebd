"""The grammars of one owner that take long keep nobody else's waiting."""

import asyncio

import pytest

from spmd_tx.coordinator.text.prompt_texts import CHILDREN, CHILDREN_OF_ONE
from spmd_tx.errors import ForeignCodeFailed
from spmd_tx.processes.child import LastingChild

BASE_MODEL = "Qwen/Qwen3-0.6B"
PATH = "http://server/oai/api/v1/completions"
HOSTILE = "hostile"


@pytest.fixture
def begun(monkeypatch):
    """The calls of child processes that have begun. Hostile ones have no end, and others fail."""
    begun = []

    async def call(child, function, arguments):
        if "source" not in arguments:  # it is made ready
            return
        begun.append(arguments["source"])
        if HOSTILE in arguments["source"]:
            await asyncio.Event().wait()
        raise ForeignCodeFailed("it ended")

    monkeypatch.setattr(LastingChild, "call", call)
    return begun


@pytest.mark.timeout(60)
@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
async def test_another_owners_grammars_are_not_waited_for(client_for, begun):
    def completion(regex):
        return {"model": BASE_MODEL, "prompt": [5, 6], "regex": regex}

    mallory, alice = await client_for("mallory"), await client_for("alice")
    asked = completion(HOSTILE)
    hostile = [asyncio.create_task(mallory.post(PATH, json=asked)) for _ in range(2 * CHILDREN)]
    while len(begun) < CHILDREN_OF_ONE:
        await asyncio.sleep(0.01)
    answer = await alice.post(PATH, json=completion("harmless"))
    assert "takes more than 1 s to compile" in answer.text
    assert len(begun) == CHILDREN_OF_ONE + 1
    for each in hostile:
        each.cancel()
    await asyncio.wait(hostile)
