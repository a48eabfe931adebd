"""Hides this process's files, and a password in its arguments, from other users of the machine."""

import os
import re
import stat
import sys
from collections.abc import Sequence
from pathlib import Path
from shlex import quote
from typing import NamedTuple

OWNER_ONLY = 0o077  # the permissions that everybody else loses
OPTION = "--database-url"
VARIABLE = "SPMD_TX_DATABASE_URL"
PASSWORD = re.compile(r"://[^/@]*:[^/@]+@")


class Hidden(NamedTuple):
    """Holds a command line without the option that had a password, and that option's value."""

    arguments: list[str]
    url: str


def keep_files() -> None:
    """Make new files and folders of this process and its children accessible to its user only."""
    os.umask(OWNER_ONLY)


def warning_about(data_dir: Path) -> str | None:
    """Return a warning if other users can open the data directory; it may be meant so and is not changed."""
    mode = stat.S_IMODE(data_dir.stat().st_mode)
    if not mode & OWNER_ONLY:
        return None
    return (
        f"{data_dir} has mode {mode:o}, so that other users of this machine may read what is in it; "
        f"shut them out with: chmod -R go= {quote(str(data_dir))}"
    )


def hide_password() -> None:
    """Restart this process with a database password in its environment instead of its arguments."""
    hidden = without_password(sys.orig_argv[1:])
    if hidden is not None:
        os.execve(sys.executable, [sys.orig_argv[0], *hidden.arguments], os.environ | {VARIABLE: hidden.url})


def without_password(arguments: Sequence[str]) -> Hidden | None:
    """Take the database URL out of the arguments if it has a password, else return None. Pure."""
    kept, url = list[str](), None
    words = iter(arguments)
    for word in words:
        name, equals, value = word.partition("=")
        if name != OPTION:
            kept.append(word)
            continue
        url = value if equals else next(words, None)
        if url is None:
            return None
    if url is None or PASSWORD.search(url) is None:
        return None
    return Hidden(kept, url)
