"""How a command travels to the workers: numbered, and with what belongs to it but changes no result."""

import msgspec

from spmd_tx.protocol.commands import AnyCommand


class Envelope(msgspec.Struct, frozen=True, kw_only=True, tag="command"):
    """Numbers a command in the broadcast order; workers refuse a gap."""

    generation: int
    sequence: int  # from 0 in each generation
    command: AnyCommand
    contexts: tuple[str, ...] = ()  # of the traces of the requests that it is for, as W3C's traceparent
