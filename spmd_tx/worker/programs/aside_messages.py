"""The messages between a worker and its process that compiles ahead of need."""

from collections.abc import Sequence

import msgspec

from spmd_tx.protocol.programs import ProgramShape
from spmd_tx.protocol.setup import Setup
from spmd_tx.worker.memory.plan import UsableMemory


class Begin(msgspec.Struct, frozen=True, kw_only=True):
    """Opens the conversation with what the process must have in common with its worker."""

    setup: Setup
    memory: UsableMemory
    settings: dict[str, bool | int | float | str | None]  # of JAX
    surroundings: str


class Made(msgspec.Struct, frozen=True, kw_only=True):
    """Says that a program is compiled, and is in the store."""

    name: str
    seconds: float


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """Answers a ProgramShape with what was compiled for it."""

    made: Sequence[Made] = ()
    problem: str | None = None


encode = msgspec.msgpack.Encoder().encode
read_begin = msgspec.msgpack.Decoder(Begin).decode
read_order = msgspec.msgpack.Decoder(ProgramShape).decode
read_answer = msgspec.msgpack.Decoder(Answer).decode
