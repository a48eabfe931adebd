"""Writes the OpenAPI document of the server's routes, for the documentation site."""

import sys
from pathlib import Path

from litestar.serialization import encode_json

from spmd_tx.coordinator.http.app import make_app


def main(file: Path) -> None:
    app = make_app(None)  # type: ignore[arg-type]  # no route is called
    file.write_bytes(encode_json(app.openapi_schema.to_schema()))
    print(f"wrote {file}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
