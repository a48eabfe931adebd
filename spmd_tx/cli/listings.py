"""Options of commands that list."""

from typing import Annotated

import typer

MostShown = Annotated[int, typer.Option(min=1, max=10_000, help="Maximum number of entries to show.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON, for scripts.")]
