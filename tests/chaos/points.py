"""Named points in the server and its workers at which a process can be made to kill itself.

Production code knows nothing of them: methods are wrapped here, before the real program starts. A point is
armed by a file of its name in the folder CHAOS_POINTS that holds a number n: the n-th passage is the last.
"""

import functools
import inspect
import os
import signal
import threading
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

FOLDER = Path(os.environ.get("CHAOS_POINTS", "/nowhere"))
FIRED = ".fired"

passages: dict[str, int] = defaultdict(int)


def arm(folder: Path, name: str, passage: int = 1) -> None:
    """Make the process that passes this point for the n-th time from now on kill itself."""
    partial = folder / f"{name}.partial"
    partial.write_text(str(passage))
    partial.rename(folder / name)


def disarm(folder: Path, name: str) -> bool:
    """Disarm the point; return whether that was too late."""
    (folder / name).unlink(missing_ok=True)
    fired = (folder / (name + FIRED)).exists()
    (folder / (name + FIRED)).unlink(missing_ok=True)
    return fired


def pass_by(name: str) -> None:
    """End this process if it is time."""
    try:
        last = int((FOLDER / name).read_text())
    except FileNotFoundError:
        passages.pop(name, None)
        return
    passages[name] += 1
    if passages[name] >= last:
        _die(name)


def pass_soon(name: str, seconds: float) -> None:
    """End this process, if it is time, a little later, in the middle of what comes next."""
    if (FOLDER / name).exists():
        timer = threading.Timer(seconds, pass_by, [name])
        timer.daemon = True
        timer.start()


def wrap(owner: Any, method: str, name: str, counts: Callable[..., bool] = lambda *_: True) -> None:
    """Put the points NAME.before and NAME.after around a method, for calls whose arguments count."""
    original = getattr(owner, method)
    if inspect.iscoroutinefunction(original):

        @functools.wraps(original)
        async def around_async(*args: Any, **kwargs: Any) -> Any:
            if not counts(*args):
                return await original(*args, **kwargs)
            pass_by(name + ".before")
            result = await original(*args, **kwargs)
            pass_by(name + ".after")
            return result

        setattr(owner, method, around_async)
        return

    @functools.wraps(original)
    def around(*args: Any, **kwargs: Any) -> Any:
        if not counts(*args):
            return original(*args, **kwargs)
        pass_by(name + ".before")
        pass_soon(name + ".during", seconds=0.002)
        result = original(*args, **kwargs)
        pass_by(name + ".after")
        return result

    setattr(owner, method, around)


def _die(name: str) -> None:
    try:
        (FOLDER / name).rename(FOLDER / (name + FIRED))
    except FileNotFoundError:
        return  # disarmed meanwhile
    os.kill(os.getpid(), signal.SIGKILL)
