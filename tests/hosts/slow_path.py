"""Makes a slow cable: two TAP interfaces, and a thread that carries Ethernet frames between them."""

import fcntl
import os
import select
import struct
import threading
import time
from collections import deque

TUNSETIFF = 0x400454CA
IFF_TAP, IFF_NO_PI = 0x0002, 0x1000
LONGEST_FRAME = 1 << 16  # bytes


class SlowPath:
    """Delivers every frame after a delay, without netem, which some kernels lack."""

    def __init__(self, name: str, seconds: float) -> None:
        self.interfaces = f"{name}a", f"{name}b"
        self._seconds = seconds
        self._files = [_open_tap(interface) for interface in self.interfaces]
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._carry, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop, and remove the interfaces."""
        self._is_over.set()
        self._thread.join()
        for file in self._files:
            os.close(file)

    def _carry(self) -> None:
        on_the_way: deque[tuple[float, int, bytes]] = deque()  # when it is due, where, what
        while not self._is_over.is_set():
            due = on_the_way[0][0] - time.monotonic() if on_the_way else 0.05
            readable, _, _ = select.select(self._files, [], [], min(max(due, 0.0), 0.05))
            now = time.monotonic()
            for file in readable:
                other = self._files[1 - self._files.index(file)]
                on_the_way.append((now + self._seconds, other, os.read(file, LONGEST_FRAME)))
            while on_the_way and on_the_way[0][0] <= now:
                _, file, frame = on_the_way.popleft()
                _write(file, frame)


def _open_tap(name: str) -> int:
    file = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(file, TUNSETIFF, struct.pack("16sH22x", name.encode(), IFF_TAP | IFF_NO_PI))
    return file


def _write(file: int, frame: bytes) -> None:
    try:
        os.write(file, frame)
    except OSError:  # the interface is down, or its queue is full: a cable would lose the frame, too
        return
