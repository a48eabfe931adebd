"""Writes the OpenAPI document of the server's routes, for the documentation site."""

import sys
from pathlib import Path
from typing import Any

from litestar.serialization import encode_json

from spmd_tx.coordinator.http.app import make_app

PARTS = {
    "/api/v1": "The Tinker API",
    "/oai/api/v1": "OpenAI's API",
    "/anthropic/api/v1": "Anthropic's API",
    "/console/api": "The console",
    "/": "Probes and metrics",
}


def document() -> dict[str, Any]:
    """Return the document, with routes in parts, and what each does in place of a name."""
    app = make_app(None)  # type: ignore[arg-type]  # no route is called
    schema = app.openapi_schema.to_schema()
    del schema["servers"]  # whatever address a server has
    for path, operations in schema["paths"].items():
        part = next(part for prefix, part in PARTS.items() if path.startswith(prefix))
        for operation in operations.values():
            operation["tags"] = [part]
            operation["summary"] = operation.pop("description")
    return schema


def main(file: Path) -> None:
    file.write_bytes(encode_json(document()))
    print(f"wrote {file}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
