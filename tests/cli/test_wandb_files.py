import json
import struct

from spmd_tx.cli.script_logs import LoggedStep
from spmd_tx.cli.wandb_files import BLOCK, WandbFile


def varint(value):
    low = value & 0x7F
    return bytes([low | 0x80]) + varint(value >> 7) if value > 0x7F else bytes([low])


def content(field, message):
    return varint(field << 3 | 2) + varint(len(message)) + message


def number(field, value):
    return varint(field << 3) + varint(value)


def history(step, values):
    """A record as wandb writes it, with a fixed64 field that readers may not know."""
    items = b"".join(
        content(
            1,
            b"".join(content(1 if len(names) == 1 else 2, name.encode()) for name in names)
            + content(16, json.dumps(value).encode()),
        )
        for names, value in ((key.split("/"), value) for key, value in values.items())
    )
    return number(1, 7) + content(2, items + content(2, number(1, step))) + varint(99 << 3 | 1) + bytes(8)


def log(*records):
    """The blocks of a file."""
    made = bytearray(b":W&B" + struct.pack("<HB", 0xBEE1, 0))
    for record in records:
        rest, is_first = record, True
        while rest or is_first:
            left = BLOCK - len(made) % BLOCK
            if left < 7:
                made += bytes(left)
                continue
            piece, rest = rest[: left - 7], rest[left - 7 :]
            kind = (1 if is_first else 4) if not rest else (2 if is_first else 3)
            made += struct.pack("<IHB", 0, len(piece), kind) + piece
            is_first = False
    return bytes(made)


SUMMARY = number(1, 3) + content(5, b"what else a record may hold")


def test_steps_are_read_also_where_records_cross_blocks(tmp_path):
    path = tmp_path / "run.wandb"
    long = {"text": "x" * 70_000, "reward": 0.5}
    path.write_bytes(
        log(SUMMARY, history(0, {"reward": 0.25, "a/b": 1}), history(300, long), history(301, {"n": 2}))
    )
    read = WandbFile(path)
    assert read.news() == [
        LoggedStep(0, {"reward": 0.25, "a/b": 1}),
        LoggedStep(300, long),
        LoggedStep(301, {"n": 2}),
    ]
    assert read.news() == []


def test_a_file_that_is_being_written_is_read_up_to_its_last_whole_record(tmp_path):
    path, whole = tmp_path / "run.wandb", log(history(0, {"a": 1}), history(1, {"text": "y" * 50_000}))
    read, found = WandbFile(path), []
    for end in (3, 7, 20, 200, 33_000, len(whole) - 1, len(whole)):
        path.write_bytes(whole[:end])
        found.append([each.step for each in read.news()])
    assert found == [[], [], [], [0], [], [], [1]]


def test_what_is_no_message_is_passed_over(tmp_path):
    path = tmp_path / "run.wandb"
    path.write_bytes(log(b"\x07\xff", b"\xff" * 20, content(2, content(1, b"\xff")), history(4, {"a": 1})))
    assert [each.step for each in WandbFile(path).news()] == [4]
