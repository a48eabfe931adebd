"""Writes docs/limits.md from the table of bounds.

Usage: python -m tests.write_limits_page
"""

from pathlib import Path

from spmd_tx.bounds import Bounds, meanings, reaches
from spmd_tx.byte_sizes import show_size

PAGE = Path(__file__).parents[1] / "docs" / "limits.md"
COMMAND = "python -m tests.write_limits_page"

INTRODUCTION = """
What one client may ask for, so that it takes nothing from the others. A request beyond a bound is refused, or
waits; the message names the bound's value. None of them changes what a request means: raise one where your
clients need more and the server has the room.

Set them with `--limit NAME=VALUE`, which may be repeated. In the environment,
`SPMD_TX_LIMIT=stop_strings=128,stop_string_bytes=4KiB` sets two; in the file of `--config` they are

```toml
[limits]
stop_strings = 128
stop_string_bytes = "4KiB"
```

For each bound the command line overrides the environment, and that the file. Limits of single keys, as
requests per second, are set with the key: [keys.md](keys.md). What cannot be changed is in
[operations.md](operations.md#bounds).
"""

HEADER = ("| Name | Default | Possible | Meaning |", "|---|---|---|---|")


def page() -> str:
    lines = ["# Limits", "", f"<!-- Written by: {COMMAND} -->", INTRODUCTION.rstrip(), "", *HEADER]
    defaults, meaning = Bounds(), meanings()
    for name, reach in reaches().items():
        lines.append(f"| `{name}` | {_shown(name, getattr(defaults, name))} | {reach} | {meaning[name]} |")
    return "\n".join([*lines, ""])


def _shown(name: str, value: float) -> str:
    is_size = "_bytes" in name and value >= 1024
    return show_size(value).replace(".0 ", " ") if is_size else f"{value:,}".removesuffix(".0")


if __name__ == "__main__":
    PAGE.write_text(page())
    print(f"wrote {PAGE}")
