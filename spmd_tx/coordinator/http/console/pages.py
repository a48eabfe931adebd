"""Serves the files of the console, which are built from ``console/``."""

from pathlib import Path

from litestar import Controller, Response, get
from litestar.params import FromPath

from spmd_tx.coordinator.http.authentication import OPEN
from spmd_tx.errors import NotFound

CONSOLE = "/console"
STATIC = Path(__file__).parent / "static"
TYPES = {".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
HEADERS = {
    "Content-Security-Policy": "default-src 'self'; base-uri 'none'; form-action 'self'; "
    "frame-ancestors 'none'",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}
INDEX = (STATIC / "index.html").read_bytes()
ASSETS = {path.name: path.read_bytes() for path in sorted((STATIC / "assets").iterdir())}


class PagesController(Controller):
    path = CONSOLE
    opt = OPEN  # pages hold nothing; what they show needs a key
    include_in_schema = False

    @get(["/", "/{page:path}"])
    async def page(self, page: FromPath[str] = "") -> Response[bytes]:
        """Return the application, which looks at the address itself."""
        if page.lstrip("/").startswith(("api/", "assets/")):
            raise NotFound(f"/console{page} does not exist")
        return _file(INDEX, "text/html; charset=utf-8", "no-cache")

    @get("/assets/{asset:str}")
    async def file(self, asset: FromPath[str]) -> Response[bytes]:
        """Return a file of the application; its address changes with its content."""
        if asset not in ASSETS:
            raise NotFound(f"/console/assets/{asset} does not exist")
        kind = TYPES.get(Path(asset).suffix, "application/octet-stream")
        return _file(ASSETS[asset], kind, "public, max-age=31536000, immutable")


def _file(content: bytes, media_type: str, caching: str) -> Response[bytes]:
    return Response(content, media_type=media_type, headers=HEADERS | {"Cache-Control": caching})
