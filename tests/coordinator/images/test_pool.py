"""Rows of the pool hold what commands read, when they are sent one after the other."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from spmd_tx.coordinator.images import pool as pools
from spmd_tx.coordinator.images.pool import ImagePool
from tests.support.seen_images import NUMBERS, seen

VOCABULARY = 1000


class Devices:
    """Remembers which patches made the tokens in each row."""

    def __init__(self, rows):
        self.rows = [None] * rows
        self.encoded = 0

    def run(self, command):
        for patches, grid, rows in zip(command.patches, command.grids, command.rows, strict=True):
            count = int(grid.prod())
            assert patches.shape == (command.patches.shape[1], NUMBERS)
            assert not patches[count:].any()
            assert (rows[: count // 4] >= 0).all()
            assert (rows[count // 4 :] == -1).all()
            for place, row in enumerate(rows[: count // 4]):
                self.rows[row] = patches[4 * place : 4 * place + 4].tobytes()
            self.encoded += 1

    def holds(self, image, ids):
        blocks = image.prepared.patches.reshape(-1, 4 * NUMBERS)
        return [self.rows[row - VOCABULARY] for row in ids] == [block.tobytes() for block in blocks]


SIZES = [(16, 16), (16, 20), (22, 14), (4, 66)]
IMAGES = [seen(f"image {number}", *SIZES[number % 4]) for number in range(9)]


@given(st.lists(st.sets(st.sampled_from(range(9)), max_size=4), max_size=12), st.integers(1, 4))
def test_a_command_finds_all_of_its_images(wanted, devices_count):
    pool, devices = ImagePool(330, devices_count, VOCABULARY), Devices(330)
    for numbers in wanted:
        images = [IMAGES[number] for number in numbers]
        if not pool.fits(images):
            continue
        placed = pool.place([*images, *images[:1]])
        for command in placed.commands:
            assert len(command.patches) <= devices_count
            devices.run(command)
        assert placed.ids.keys() == {image.key for image in images}
        assert all(devices.holds(image, placed.ids[image.key]) for image in images)
        rows = np.concatenate([*placed.ids.values(), np.zeros(0, np.int32)])
        assert len(set(rows.tolist())) == len(rows)


def test_an_image_that_is_there_is_not_encoded_again():
    pool, devices = ImagePool(64 * 64, 4, VOCABULARY), Devices(64 * 64)
    images = [seen(f"{number}") for number in range(64)]
    for _ in range(2 * 17):
        for image in images:
            for command in pool.place([image]).commands:
                devices.run(command)
    assert devices.encoded == 64


def test_what_was_read_longest_ago_makes_room():
    pool = ImagePool(3 * 64, 1, VOCABULARY)
    first, second, third, fourth = (seen(name) for name in "abcd")
    for image in (first, second, third, first, fourth):
        pool.place([image])
    assert not pool.place([first]).commands
    assert not pool.place([third]).commands
    assert pool.place([second]).commands


def test_owners_share_no_image():
    pool = ImagePool(3 * 64, 1, VOCABULARY)
    pool.place([seen("a")])
    assert pool.place([seen("a", owner="bob")]).commands


def test_after_forgetting_everything_is_encoded_again():
    pool = ImagePool(64, 1, VOCABULARY)
    pool.place([seen("a")])
    pool.clear()
    assert pool.place([seen("a")]).commands


def test_images_of_a_command_are_padded_alike_and_not_too_large(monkeypatch):
    monkeypatch.setattr(pools, "PATCH_BYTES", 2 * 512 * NUMBERS)
    pool = ImagePool(4096, 8, VOCABULARY)
    images = [seen("a"), *(seen(name, 22, 14) for name in "bcdef"), seen("g", 32, 40)]
    commands = pool.place(images).commands
    assert sorted(command.patches.shape[:2] for command in commands) == [
        (1, 256),
        (1, 512),
        (1, 2048),
        (2, 512),
        (2, 512),
    ]


@pytest.mark.parametrize(
    "sizes, rows, takes", [([64] * 3, 192, True), ([64] * 30, 1152, True), ([64] * 30, 1151, False)]
)
def test_a_prompt_is_taken_if_its_chunks_find_room_wherever_they_are_cut(sizes, rows, takes):
    images = [seen(f"{number}", 16, size // 4) for number, size in enumerate(sizes)]
    assert ImagePool(rows, 1, VOCABULARY).takes(images) == takes


def test_without_rows_there_is_room_for_no_image():
    assert ImagePool().fits([])
    assert not ImagePool().fits([seen("a")])
    assert not ImagePool().takes([seen("a")])
