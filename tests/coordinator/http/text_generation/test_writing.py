import asyncio
import threading

import pytest
from litestar.response import Stream

from spmd_tx.coordinator.http.text_generation import writing
from spmd_tx.coordinator.http.text_generation.choices import TOKEN_COST, ChoiceTokens
from spmd_tx.coordinator.wire.sampling_protobuf import TopLogprobs

MANY = writing.SMALL_COST // TOKEN_COST + 1


def part(tokens, width=0):
    top = TopLogprobs.none(tokens, width) if width else None
    return ChoiceTokens(None, [0] * tokens, [0.0] * tokens, top, None)  # type: ignore[arg-type]  # nobody asks


@pytest.mark.parametrize(
    "piece, is_here",
    [([part(3)], True), ([part(MANY)], False), ([part(2, 256)], True), ([part(9, 256)], False)],
)
async def test_what_takes_long_is_written_in_a_thread(piece, is_here):
    where = []

    def written(piece):
        where.append(threading.current_thread())
        return b"x"

    assert await writing.write(piece, written) == b"x"
    assert (where == [threading.current_thread()]) == is_here


async def test_likeliest_tokens_are_written_one_piece_at_a_time():
    writing_now, most = [0], [0]

    def written(piece):
        writing_now[0] += 1
        most[0] = max(most[0], writing_now[0])
        threading.Event().wait(0.01)
        writing_now[0] -= 1
        return b""

    await asyncio.gather(*(writing.write([part(99, 256)], written) for _ in range(5)))
    assert most == [1]


async def pieces(sizes, taken):
    for size in sizes:
        taken.append(size)
        yield b"x" * size


async def test_a_short_answer_is_sent_with_its_length_and_a_long_one_as_it_is_written():
    closed, taken = [], []
    short = await writing.response(pieces([5, 7], taken), lambda: closed.append("short"))
    assert (short.content, closed) == (b"x" * 12, ["short"])
    sizes = [writing.SHORT_BYTES, 1, 5, 7]
    taken.clear()
    long = await writing.response(pieces(sizes, taken), lambda: closed.append("long"))
    assert isinstance(long, Stream)
    assert (taken, closed) == (sizes[:2], ["short"])  # the rest is made when the client has read so far
    assert b"".join([each async for each in long.iterator]) == b"x" * sum(sizes)  # type: ignore[union-attr]
    assert closed == ["short", "long"]
