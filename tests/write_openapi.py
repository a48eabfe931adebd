"""Writes the OpenAPI documents of the server's routes, one for each page of the documentation site."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from litestar.serialization import encode_json

from spmd_tx.coordinator.http.app import make_app

PARTS = {  # by the beginning of their paths: the page's name, and what it is called
    "/api/v1": ("tinker", "The Tinker API"),
    "/oai/api": ("openai", "OpenAI's API"),
    "/anthropic/api": ("anthropic", "Anthropic's API"),
    "/console/api": ("console", "The console"),
    "/": ("probes", "Probes and metrics"),
}
SCHEMAS = "#/components/schemas/"


def document() -> dict[str, Any]:
    """Return the document of all routes, each with what it does in place of a name."""
    app = make_app(None)  # type: ignore[arg-type]  # no route is called
    schema = app.openapi_schema.to_schema()
    del schema["servers"]  # whatever address a server has
    for operations in schema["paths"].values():
        for operation in operations.values():
            operation["summary"] = operation.pop("description")
    return schema


def parts() -> dict[str, dict[str, Any]]:
    """Return the document of each page, with the types that its routes use."""
    whole = document()
    types = whole["components"]["schemas"]
    paths: dict[str, dict[str, Any]] = {name: {} for name, _ in PARTS.values()}
    for path, operations in whole["paths"].items():
        name, title = next(page for prefix, page in PARTS.items() if path.startswith(prefix))
        paths[name][path] = operations
        for operation in operations.values():
            operation["tags"] = [title]
    return {
        name: whole
        | {
            "paths": of_page,
            "components": whole["components"]
            | {"schemas": {used: types[used] for used in sorted(types_in(of_page, types))}},
        }
        for name, of_page in paths.items()
    }


def types_in(described: Any, types: dict[str, Any]) -> set[str]:
    """Return the names of the types that something refers to, at any depth."""
    found: set[str] = set()
    unread = [described]
    while unread:
        new = set(_references(unread.pop())) - found
        found |= new
        unread += [types[name] for name in new]
    return found


def _references(described: Any) -> Iterator[str]:
    if isinstance(described, dict):
        if str(described.get("$ref", "")).startswith(SCHEMAS):
            yield described["$ref"].removeprefix(SCHEMAS)
        for value in described.values():
            yield from _references(value)
    elif isinstance(described, list | tuple):
        for value in described:
            yield from _references(value)


def main(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, part in parts().items():
        (folder / f"{name}.json").write_bytes(encode_json(part))
    print(f"wrote documents of {', '.join(name for name, _ in PARTS.values())} into {folder}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
