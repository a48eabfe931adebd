"""Keeps what this process has from other users of the machine: its files, a password in its arguments."""

import os
import re
import stat
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

OWNER_ONLY = 0o077  # what nobody else may
OPTION = "--database-url"
VARIABLE = "SPMD_TX_DATABASE_URL"
PASSWORD = re.compile(r"://[^/@]*:[^/@]+@")


class Hidden(NamedTuple):
    """A command line without the option whose value holds a password."""

    arguments: list[str]
    url: str


def keep_files() -> None:
    """Files and folders of this process, and of those that it starts, are its user's alone."""
    os.umask(OWNER_ONLY)


def warning_about(data_dir: Path) -> str | None:
    """What to do about a data directory that is open to others; it may be meant so, and stays as it is."""
    mode = stat.S_IMODE(data_dir.stat().st_mode)
    if not mode & OWNER_ONLY:
        return None
    return (
        f"{data_dir} has mode {mode:o}, so that other users of this machine may read what is in it; "
        f"shut them out with: chmod -R go= {data_dir}"
    )


def hide_password() -> None:
    """Start this program again, in its place, with the password where other users do not see it."""
    hidden = without_password(sys.orig_argv[1:])
    if hidden is not None:
        os.execve(sys.executable, [sys.orig_argv[0], *hidden.arguments], os.environ | {VARIABLE: hidden.url})


def without_password(arguments: Sequence[str]) -> Hidden | None:
    """None if no password is given. Pure."""
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
