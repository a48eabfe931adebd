"""Reads what a script has logged from the file that wandb writes, also offline and while it is written.

The file is a log in blocks, as LevelDB has it: each record has a checksum, a length and a type, and one that
does not fit into its block goes on in the next. A record is a protobuf message, of which few fields matter.
"""

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from google.protobuf.empty_pb2 import Empty
from google.protobuf.message import DecodeError
from google.protobuf.unknown_fields import UnknownFieldSet

from spmd_tx.cli.script_logs import LoggedStep

FIRST = 7  # bytes of the file's own header
BLOCK = 32 << 10
HEADER = struct.Struct("<IHB")  # checksum, length, type
WHOLE, BEGIN, END = 1, 2, 4  # types; 3 is in the middle

HISTORY, ITEM, STEP = 2, 1, 2  # fields of a record, and of what it logs
NUMBER, KEY, NESTED_KEY, VALUE = 1, 1, 2, 16  # fields of a step, and of an item


class WandbFile:
    """Reads the steps that a file has got since the last look."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._at = FIRST
        self._begun = b""

    def news(self) -> list[LoggedStep]:
        """Return what is new. Raises OSError."""
        with self._path.open("rb") as file:
            return [logged for record in self._records(file) if (logged := _logged(record)) is not None]

    def _records(self, file: BinaryIO) -> Iterator[bytes]:
        while True:
            left = BLOCK - self._at % BLOCK
            if left < HEADER.size:
                self._at += left
                continue
            file.seek(self._at)
            header = file.read(HEADER.size)
            if len(header) < HEADER.size:
                return
            _, length, kind = HEADER.unpack(header)
            piece = file.read(length)
            if kind == 0 or len(piece) < length:
                return
            self._at += HEADER.size + length
            self._begun = piece if kind in (WHOLE, BEGIN) else self._begun + piece
            if kind in (WHOLE, END):
                yield self._begun


def _logged(record: bytes) -> LoggedStep | None:
    """Return what a record logs; None: it is another one, or unreadable."""
    try:
        for field, history in _fields(record):
            if field == HISTORY and isinstance(history, bytes):
                return _history(history)
    except (DecodeError, ValueError):
        pass
    return None


def _history(history: bytes) -> LoggedStep:
    step, values = None, dict[str, object]()
    for field, content in _fields(history):
        if field == STEP and isinstance(content, bytes):
            step = next((number for name, number in _fields(content) if name == NUMBER), 0)
        elif field == ITEM and isinstance(content, bytes):
            item = list(_fields(content))
            names = [
                text.decode() for name, text in item if name in (KEY, NESTED_KEY) and isinstance(text, bytes)
            ]
            value = next((text for name, text in item if name == VALUE), b"null")
            values["/".join(filter(None, names))] = json.loads(value if isinstance(value, bytes) else b"null")
    return LoggedStep(step if isinstance(step, int) else None, values)


def _fields(message: bytes) -> Iterator[tuple[int, Any]]:
    """Give numbers and contents of a message's fields, whatever it is. Raises DecodeError."""
    for field in UnknownFieldSet(Empty.FromString(message)):
        yield field.field_number, field.data
