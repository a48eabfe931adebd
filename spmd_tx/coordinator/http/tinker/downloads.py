"""Routes to download checkpoints: signed links for an API key, and the files behind the links."""

import time
from email.utils import formatdate
from functools import partial
from pathlib import PurePosixPath
from typing import NamedTuple
from urllib.parse import quote

from litestar import Controller, Response, get, route
from litestar.enums import HttpMethod, MediaType
from litestar.params import FromPath
from litestar.response import Stream
from litestar.status_codes import (
    HTTP_200_OK,
    HTTP_206_PARTIAL_CONTENT,
    HTTP_302_FOUND,
    HTTP_304_NOT_MODIFIED,
    HTTP_416_REQUESTED_RANGE_NOT_SATISFIABLE,
)

from spmd_tx.coordinator.checkpoints.files import Manifest
from spmd_tx.coordinator.http.authentication import SIGNED
from spmd_tx.coordinator.http.errors import error_response
from spmd_tx.coordinator.http.security.signed_urls import LIFETIME_SECONDS
from spmd_tx.coordinator.http.services import Addressed, ApiCall
from spmd_tx.coordinator.http.tinker import downloads_content
from spmd_tx.coordinator.http.tinker.checkpoints import CHECKPOINT
from spmd_tx.coordinator.wire.checkpoint_paths import EXTERNAL_WEIGHTS, CheckpointPath
from spmd_tx.coordinator.wire.checkpoints import ExternalWeightsUrlsResponse
from spmd_tx.coordinator.wire.moments import write_moment
from spmd_tx.errors import InvalidRequest, NotFound

PREFIX = "/api/v1"
FILES, ARCHIVES = "/downloads/files", "/downloads/archives"
ADDRESS = "/{run_id:str}/{kind:str}/{name:str}/{version:str}"
READ = [HttpMethod.GET, HttpMethod.HEAD]


class DownloadsController(Controller):
    @get(CHECKPOINT + "/external_weights_urls")
    async def external_weights_urls(self, address: Addressed, call: ApiCall) -> ExternalWeightsUrlsResponse:
        """Return a link to each file of an exported checkpoint."""
        manifest = await call.describe_checkpoint(address)
        if address.kind != EXTERNAL_WEIGHTS:
            raise InvalidRequest(f"{address} is not an export; download one made by save_weights_external")
        expires = write_moment(int(time.time() + LIFETIME_SECONDS))
        files = sorted(manifest.files)
        links = {file: _link(call, address, manifest, FILES, file) for file in files}
        await _note_reading(call, address, manifest)
        return ExternalWeightsUrlsResponse(links, expires)

    @get(CHECKPOINT + "/archive")
    async def archive(self, address: Addressed, call: ApiCall) -> Response[bytes]:
        """Return a link to an archive of all files, for SDKs up to 0.35. They read it from the redirect."""
        manifest = await call.describe_checkpoint(address)
        await _note_reading(call, address, manifest)
        headers = {
            "Location": _link(call, address, manifest, ARCHIVES),
            "Expires": formatdate(int(time.time() + LIFETIME_SECONDS), usegmt=True),
        }
        return Response(b"", status_code=HTTP_302_FOUND, headers=headers, media_type=MediaType.TEXT)

    @route(FILES + ADDRESS + "/{file:path}", http_method=READ, opt=SIGNED)
    async def file(
        self, address: Addressed, version: FromPath[str], file: FromPath[str], call: ApiCall
    ) -> Response:
        """Send one file."""
        manifest = await _version(call, address, version)
        file = file.removeprefix("/")
        content = _Content(
            name=PurePosixPath(file).name,
            etag=f'"{manifest.digests.get(file, version)}"',
            parts=downloads_content.of_file(manifest, file),
        )
        return _answer(call, address, manifest, content)

    @route(ARCHIVES + ADDRESS, http_method=READ, opt=SIGNED)
    async def archive_file(self, address: Addressed, version: FromPath[str], call: ApiCall) -> Response:
        """Send all files as one archive."""
        manifest = await _version(call, address, version)
        parts = downloads_content.of_archive(manifest)
        return _answer(call, address, manifest, _Content(f"{address.name}.tar", f'"{version}"', parts))


class _Content(NamedTuple):
    """Holds what is to be sent."""

    name: str
    etag: str
    parts: list[downloads_content.ContentPart]


async def _version(call: ApiCall, address: CheckpointPath, version: str) -> Manifest:
    """Return the manifest of the checkpoint behind a link. Raises NotFound if it was overwritten since."""
    manifest = await call.describe_checkpoint(address)
    if manifest.version != version:
        raise NotFound(f"checkpoint {address} was overwritten since this link was made; ask for a new one")
    return manifest


async def _note_reading(call: ApiCall, address: CheckpointPath, manifest: Manifest) -> None:
    """Audit that links were given out; their use is anonymous."""
    await call.note("checkpoint_read", manifest.owner, tinker_path=str(address), purpose="download")


def _link(call: ApiCall, address: CheckpointPath, manifest: Manifest, route: str, *file: str) -> str:
    """Sign a URL for a caller who can read the checkpoint now."""
    caller, owner = call.caller, manifest.owner
    reader = owner if caller.sees(owner) else caller.owner
    return call.sign("/".join([PREFIX + route, *address, manifest.version, *file]), reader)


def _answer(call: ApiCall, address: CheckpointPath, manifest: Manifest, content: _Content) -> Response:
    """Send the content or the range that is asked for, or say that the client has it (304)."""
    headers, size = dict(call.request.headers), downloads_content.size_of(content.parts)
    about = {"ETag": content.etag, "Accept-Ranges": "bytes", "Cache-Control": "private"}
    if downloads_content.is_known(headers, content.etag):
        return Response(b"", status_code=HTTP_304_NOT_MODIFIED, headers=about, media_type=MediaType.TEXT)
    span = downloads_content.requested_range(headers, content.etag, size)
    if span is not None and span.start >= span.end:
        refusal = error_response(
            f"{headers['range']!r} asks for bytes that are not there: {content.name} has {size}",
            HTTP_416_REQUESTED_RANGE_NOT_SATISFIABLE,
        )
        refusal.headers["Content-Range"] = f"bytes */{size}"
        return refusal
    status = HTTP_200_OK
    if span is not None:
        status = HTTP_206_PARTIAL_CONTENT
        about["Content-Range"] = f"bytes {span.start}-{span.end - 1}/{size}"
    span = span or downloads_content.ByteRange(0, size)
    about["Content-Length"] = str(span.end - span.start)
    about["Content-Disposition"] = f"attachment; filename*=UTF-8''{quote(content.name, safe='')}"
    read = partial(call.checkpoints.read, address, manifest)
    return Stream(
        downloads_content.pieces(content.parts, span, read),
        status_code=status,
        headers=about,
        media_type="application/octet-stream",
    )
