"""Says how much of a model has been downloaded, by the files that grow in the Hub's cache."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from spmd_tx.byte_sizes import show_size

FIRST_SECONDS, NEXT_SECONDS = 2.0, 5.0  # until the first line, and between two
BLOCK_BYTES = 512  # of which the operating system counts those of a file

OnNews = Callable[[str], None]


@contextmanager
def told(name: str, folder: Path, total: int, report: OnNews) -> Iterator[None]:
    """Report now and then how many of ``total`` bytes have come into a folder since the beginning."""
    before, began, has_ended = _size(folder), time.monotonic(), threading.Event()

    def tell() -> None:
        seconds = FIRST_SECONDS
        while not has_ended.wait(seconds):
            come = min(max(0, _size(folder) - before), total)
            speed = come / (time.monotonic() - began)
            report(
                f"{show_size(come)} of {show_size(total)} of {name} downloaded, {show_size(speed)} a second"
            )
            seconds = NEXT_SECONDS

    thread = threading.Thread(target=tell, name="download-news", daemon=True)
    thread.start()
    try:
        yield
    finally:
        has_ended.set()
        thread.join()


def _size(folder: Path) -> int:
    """Return the bytes of all files in a folder, without the holes in those that are written in pieces."""
    sizes = 0
    for file in folder.glob("*"):
        try:
            found = file.stat()
        except FileNotFoundError:  # it has got another name by now
            continue
        sizes += min(found.st_size, found.st_blocks * BLOCK_BYTES)
    return sizes
