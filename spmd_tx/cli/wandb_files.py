"""Reads what a script has logged from the file that wandb writes, also offline and while it is written.

The file is a log in blocks, as LevelDB has it: each record has a checksum, a length and a type, and one that
does not fit into its block goes on in the next. A record is a protobuf message, of which few fields matter.
"""

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

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
    except (ValueError, IndexError, UnicodeDecodeError):
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


def _fields(message: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Give numbers and contents of a message's fields. Raises ValueError and IndexError."""
    at = 0
    while at < len(message):
        tag, at = _varint(message, at)
        match tag & 7:
            case 0:
                value, at = _varint(message, at)
                yield tag >> 3, value
            case 2:
                length, at = _varint(message, at)
                yield tag >> 3, message[at : at + length]
                at += length
            case 1:
                at += 8
            case 5:
                at += 4
            case other:
                raise ValueError(f"a field of kind {other}")


def _varint(message: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = message[at]
        value |= (byte & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if byte < 0x80:
            return value, at
