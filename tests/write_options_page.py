"""Writes docs/options.md from the options of ``spmd-tx serve``.

Usage: python -m tests.write_options_page
"""

import inspect
import re
from pathlib import Path

from spmd_tx.cli.main import serve
from spmd_tx.options import flag

PAGE = Path(__file__).parents[1] / "docs" / "options.md"
COMMAND = "python -m tests.write_options_page"

INTRODUCTION = """
Each option can be set on the command line, in the environment, as `SPMD_TX_` and its name in capitals
(`SPMD_TX_PORT`), and in a TOML file that `--config` names. The command line overrides the environment, which
overrides the file. Keys and variables that no option has are refused. Keys of the file are the names with
underscores:

```toml
base_model = "Qwen/Qwen3-4B"
tensor_parallel_size = 8
max_lora_rank = 64
```

`spmd-tx serve --help` prints the same; `spmd-tx COMMAND --help` prints the options of the other commands.
`spmd-tx plan` takes the model, mesh and size options too, and says what would fit on which devices
([memory.md](memory.md)). [limits.md](limits.md) lists the names and values that `--limit` takes.
"""

HEADER = ("| option | default | meaning |", "|---|---|---|")


def page() -> str:
    panels: dict[str, list[str]] = {}
    for name, parameter in inspect.signature(serve).parameters.items():
        (option,) = parameter.annotation.__metadata__
        default = "" if option.show_default is False else _shown(parameter.default)
        row = f"| `{flag(name)}` | {default} | {_marked_up(option.help)} |"
        panels.setdefault(option.rich_help_panel or "General", []).append(row)
    lines = ["# Options of `spmd-tx serve`", "", f"<!-- Written by: {COMMAND} -->", INTRODUCTION.rstrip()]
    for panel, rows in panels.items():
        lines += ["", f"## {panel}", "", *HEADER, *rows]
    return "\n".join([*lines, ""])


def _shown(default: object) -> str:
    if default is inspect.Parameter.empty:
        return "required"
    return "" if default is None else f"`{default}`"


def _marked_up(text: str) -> str:
    """The help of an option, with options, variables and links as Markdown has them."""
    text = re.sub(r"(?<![\w-])(--[a-z-]+[a-z]|SPMD_TX_[A-Z]+)", r"`\1`", text)
    return re.sub(r"docs/(\w+\.md)", r"[\1](\1)", text)


if __name__ == "__main__":
    PAGE.write_text(page())
    print(f"wrote {PAGE}")
