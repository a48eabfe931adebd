"""Writes docs/limits.md from the table of bounds.

Usage: python -m tests.write_limits_page
"""

from pathlib import Path

from spmd_tx.bounds import Bounds, reaches
from spmd_tx.byte_sizes import show_size
from spmd_tx.options import declared

PAGE = Path(__file__).parents[1] / "docs" / "limits.md"
COMMAND = "python -m tests.write_limits_page"

INTRODUCTION = """
These limits keep one client from using up what the others need. A request beyond a limit is refused or
waits, and the message shows the limit. No limit changes the result of a request: raise one if your clients
need more and the server has the memory.

Set them with `--limit NAME=VALUE`, which may be repeated. In the environment,
`SPMD_TX_LIMIT=stop_strings=128,stop_string_bytes=4KiB` sets two; in the file of `--config` they are

```toml
[limits]
stop_strings = 128
stop_string_bytes = "4KiB"
```

For each limit, the command line overrides the environment, and the environment overrides the file. Limits
of a key, such as requests per second, are set with the key: [keys.md](keys.md). Bounds that cannot be
changed are in [operations.md](operations.md#bounds).
"""

HEADER = ("| Name | Default | Range | Meaning |", "|---|---|---|---|")


def page() -> str:
    lines = ["# Limits", "", f"<!-- Written by: {COMMAND} -->", INTRODUCTION.rstrip(), "", *HEADER]
    defaults, ranges = Bounds(), reaches()
    for name, bound in declared(Bounds):
        lines.append(
            f"| `{name}` | {_shown(name, getattr(defaults, name))} | {ranges[name]} | {bound.help} |"
        )
    return "\n".join([*lines, ""])


def _shown(name: str, value: float) -> str:
    is_size = "_bytes" in name and value >= 1024
    return show_size(value).replace(".0 ", " ") if is_size else f"{value:,}".removesuffix(".0")


if __name__ == "__main__":
    PAGE.write_text(page())
    print(f"wrote {PAGE}")
