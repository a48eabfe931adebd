import asyncio
import subprocess
import sys
import threading

import pytest

from spmd_tx.coordinator.runtime import loop_watchdog, metrics
from spmd_tx.coordinator.runtime.loop_watchdog import DEAD_SECONDS, EXIT_CODE, LoopWatchdog, counted_seconds

LOOK = loop_watchdog.SECONDS_BETWEEN_LOOKS


class Ending:
    """What the watchdog does to a dead process."""

    def __init__(self):
        self.times = 0

    def __call__(self):
        self.times += 1


@pytest.fixture
def ending():
    return Ending()


@pytest.fixture
async def watchdog(ending):
    return LoopWatchdog(asyncio.get_running_loop(), ending)


def counted():
    samples = {
        sample.name: sample.value for family in metrics.REGISTRY.collect() for sample in family.samples
    }
    prefix = "spmd_tx_event_loop_"
    return samples[f"{prefix}stalls_total"], samples[f"{prefix}stall_seconds_total"]


def keep_the_loop_standing(look, times):
    """Blocks until another thread has looked so often."""
    thread = threading.Thread(target=lambda: [look(LOOK) for _ in range(times)])
    thread.start()
    thread.join()


async def test_a_loop_that_turns_is_left_alone(watchdog, ending, caplog):
    before = counted()
    for _ in range(10_000):
        watchdog.look(LOOK)
        await asyncio.sleep(0)
    assert (counted(), caplog.text, ending.times) == (before, "", 0)


async def test_where_a_loop_stands_is_written_down_once_and_how_long_in_all(watchdog, caplog):
    keep_the_loop_standing(watchdog.look, 1 + 12)
    assert caplog.text.count("the event loop has been blocked for 1.2 s") == 1
    assert caplog.text.count("in keep_the_loop_standing") == 1
    assert "the event loop continues" not in caplog.text
    await asyncio.sleep(0)
    watchdog.look(LOOK)
    assert caplog.text.count("the event loop continues; it was blocked for 3.0 s") == 1


async def test_stalls_are_counted_with_their_seconds_and_the_longest_stays(watchdog):
    stalls, seconds = counted()
    for looks in (20, 8):
        keep_the_loop_standing(watchdog.look, 1 + looks)
        await asyncio.sleep(0)
    assert counted() == (stalls + 2, pytest.approx(seconds + 28 * LOOK))
    assert metrics.REGISTRY.get_sample_value("spmd_tx_event_loop_longest_stall_seconds") == 20 * LOOK


async def test_a_short_stand_is_no_stall(watchdog, caplog):
    before = counted()
    keep_the_loop_standing(watchdog.look, 1 + 4)
    assert (counted(), caplog.text) == (before, "")


async def test_a_loop_that_stands_for_good_ends_the_process(watchdog, ending, caplog):
    looks = round(DEAD_SECONDS / LOOK)
    keep_the_loop_standing(watchdog.look, looks)
    assert ending.times == 0
    keep_the_loop_standing(watchdog.look, 1)
    assert ending.times == 1
    assert f"the process exits with code {EXIT_CODE}" in caplog.text


@pytest.mark.parametrize(
    "wall, computed, counts",
    [
        (LOOK, 0.0, LOOK),
        (3600.0, 0.01, LOOK),  # stopped by a signal, or with its whole machine
        (8.5, 8.0, 8.0),  # foreign code that lets no thread run
        (0.5, 4.0, 0.5),  # many threads
    ],
)
def test_time_in_which_the_process_did_not_run_does_not_count(wall, computed, counts):
    assert counted_seconds(wall, computed) == counts


def run(program):
    return subprocess.run([sys.executable, "-c", program], stderr=subprocess.PIPE, text=True, timeout=60)


def test_the_end_of_a_dead_process_has_a_code_of_its_own_and_shows_where_all_threads_are():
    ended = run("""
import threading
from spmd_tx.coordinator.runtime import loop_watchdog

stands = threading.Event()

def the_loop():
    stands.set()
    threading.Event().wait()

threading.Thread(target=lambda: (stands.wait(), loop_watchdog.end_process())).start()
the_loop()
""")
    assert ended.returncode == EXIT_CODE
    assert "in the_loop" in ended.stderr


def test_code_that_keeps_the_lock_of_python_for_good_ends_too():
    """No other thread of the process gets to do anything."""
    ended = run("""
import collections, itertools
from spmd_tx.coordinator.runtime import loop_watchdog

def foreign_code():
    collections.deque(itertools.count(), maxlen=0)

with loop_watchdog.ended_if_nobody_looks():
    loop_watchdog.give_time_to_look(0.05)
    foreign_code()
""")
    assert ended.returncode != 0
    assert "in foreign_code" in ended.stderr


def test_a_loop_is_watched_until_it_ends_in_order():
    ended = run("""
import asyncio
from spmd_tx.coordinator.runtime import event_loop, loop_watchdog

async def main():
    with loop_watchdog.watching(asyncio.get_running_loop()):
        pass

event_loop.run(main())
""")
    assert (ended.returncode, ended.stderr) == (0, "")
