"""Writes the part of the OpenAPI document that the console reads: TypeScript types are generated from it."""

import hashlib
import sys
from pathlib import Path
from typing import Any

from litestar.serialization import encode_json

from tests import write_openapi

OWN = "/console/api/"  # every route below is the console's
STREAM = "/console/api/stream"  # of events
SDK_ROUTES = (
    "/api/v1/checkpoints",
    "/api/v1/audit",
    "/api/v1/trajectories",
    "/api/v1/trajectories/{trajectory_id}",
    "/oai/api/v1/models",
)


def document() -> dict[str, Any]:
    """Return the document of what pages get, without what they do not read."""
    whole = write_openapi.document()
    paths = {
        path: {"get": _reduced(operations["get"])}
        for path, operations in sorted(whole["paths"].items())
        if path in SDK_ROUTES or (path.startswith(OWN) and path != STREAM and "get" in operations)
    }
    schemas = whole["components"]["schemas"]
    components = {"schemas": {name: schemas[name] for name in sorted(_names(paths, schemas))}}
    info = {"title": "What the console reads", "version": ""}  # the same in all versions
    return {"openapi": whole["openapi"], "info": info, "paths": paths, "components": components}


def _reduced(operation: dict[str, Any]) -> dict[str, Any]:
    content = operation["responses"]["200"]["content"]
    parameters = operation.get("parameters", [])
    return {"parameters": parameters, "responses": {"200": {"description": "", "content": content}}}


def digest() -> str:
    """Return the hash that the generated types carry."""
    return hashlib.sha256(encode_json(document())).hexdigest()


def _names(part: Any, schemas: dict[str, Any]) -> set[str]:
    """Find the schemas that a part of the document refers to, and those that they refer to."""
    if isinstance(part, list):
        return set[str]().union(*(_names(each, schemas) for each in part))
    if not isinstance(part, dict):
        return set()
    if "$ref" in part:
        name = part["$ref"].rpartition("/")[2]
        return {name} | _names(schemas[name], schemas)
    return _names(list(part.values()), schemas)


def main(file: Path) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(encode_json(document()))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
