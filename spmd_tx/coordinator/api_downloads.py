"""Routes to download checkpoints: those that give links, with an API key, and those behind them, without."""

import time
from datetime import UTC, datetime
from email.utils import formatdate
from functools import partial
from pathlib import PurePosixPath
from typing import NamedTuple
from urllib.parse import quote

from litestar import Controller, Request, Response, get, route
from litestar.enums import HttpMethod, MediaType
from litestar.params import FromPath, FromQuery
from litestar.response import Stream
from litestar.status_codes import (
    HTTP_200_OK,
    HTTP_206_PARTIAL_CONTENT,
    HTTP_302_FOUND,
    HTTP_304_NOT_MODIFIED,
    HTTP_416_REQUESTED_RANGE_NOT_SATISFIABLE,
)

from spmd_tx.coordinator import byte_ranges, checkpoint_files, download_content, signed_urls
from spmd_tx.coordinator.access import Access
from spmd_tx.coordinator.api_checkpoints import CHECKPOINT
from spmd_tx.coordinator.checkpoint_files import EXTERNAL_WEIGHTS
from spmd_tx.coordinator.checkpoint_schemas import ExternalWeightsUrlsResponse
from spmd_tx.coordinator.dependencies import Accessible, Service, Services
from spmd_tx.coordinator.http_errors import error_response
from spmd_tx.coordinator.route_marks import OPEN
from spmd_tx.coordinator.signed_urls import LIFETIME_SECONDS, File
from spmd_tx.errors import InvalidRequest, NotFound

PREFIX = "/api/v1"
FILES, ARCHIVES = "/downloads/files", "/downloads/archives"
ADDRESS = "/{run_id:str}/{kind:str}/{name:str}"
READ = [HttpMethod.GET, HttpMethod.HEAD]


class DownloadsController(Controller):
    path = PREFIX

    @get(CHECKPOINT + "/external_weights_urls")
    async def external_weights_urls(
        self,
        run_id: FromPath[str],
        kind: FromPath[str],
        name: FromPath[str],
        request: Request,
        services: Service,
        access: Accessible,
    ) -> ExternalWeightsUrlsResponse:
        """A link to each file of an exported checkpoint."""
        whole = await _readable(access, run_id, kind, name)
        if kind != EXTERNAL_WEIGHTS:
            raise InvalidRequest(f"{whole.path} is no export; download one that save_weights_external made")
        expires = int(time.time()) + LIFETIME_SECONDS
        files = [whole._replace(name=file) for file in sorted(whole.manifest.files)]
        return ExternalWeightsUrlsResponse(
            urls={file.name: _link(request, services, file, expires) for file in files},
            expires=datetime.fromtimestamp(expires, UTC).isoformat(),
        )

    @get(CHECKPOINT + "/archive")
    async def archive(
        self,
        run_id: FromPath[str],
        kind: FromPath[str],
        name: FromPath[str],
        request: Request,
        services: Service,
        access: Accessible,
    ) -> Response[bytes]:
        """A link to all files as one archive, for SDKs up to 0.35. They read it, and do not follow it."""
        whole = await _readable(access, run_id, kind, name)
        expires = int(time.time()) + LIFETIME_SECONDS
        headers = {
            "Location": _link(request, services, whole, expires),
            "Expires": formatdate(expires, usegmt=True),
        }
        return Response(b"", status_code=HTTP_302_FOUND, headers=headers, media_type=MediaType.TEXT)

    @route(FILES + ADDRESS + "/{file:path}", http_method=READ, opt=OPEN)
    async def file(
        self,
        run_id: FromPath[str],
        kind: FromPath[str],
        name: FromPath[str],
        file: FromPath[str],
        request: Request,
        services: Service,
        expires: FromQuery[int] = 0,
        signature: FromQuery[str] = "",
    ) -> Response:
        """One file."""
        asked = _Asked(run_id, kind, name, file.removeprefix("/"))
        signed = await _signed(services, asked, expires, signature)
        content = _Content(
            name=PurePosixPath(signed.name).name,
            etag=f'"{signed.manifest.digests.get(signed.name, signed.manifest.created_at)}"',
            parts=download_content.of_file(signed.manifest, signed.name),
        )
        return _answer(request, services, signed, content)

    @route(ARCHIVES + ADDRESS, http_method=READ, opt=OPEN)
    async def archive_file(
        self,
        run_id: FromPath[str],
        kind: FromPath[str],
        name: FromPath[str],
        request: Request,
        services: Service,
        expires: FromQuery[int] = 0,
        signature: FromQuery[str] = "",
    ) -> Response:
        """All files."""
        signed = await _signed(services, _Asked(run_id, kind, name, ""), expires, signature)
        content = _Content(
            name=f"{signed.path.name}.tar",
            etag=f'"{signed.manifest.created_at}"',
            parts=download_content.of_archive(signed.manifest),
        )
        return _answer(request, services, signed, content)


class _Asked(NamedTuple):
    """A file, as its link names it."""

    run_id: str
    kind: str
    name: str
    file: str  # "": all of them


class _Content(NamedTuple):
    """What is sent of a file."""

    name: str
    etag: str
    parts: list[download_content.Part]


async def _readable(access: Access, run_id: str, kind: str, name: str) -> File:
    """All files of a checkpoint that the caller may read."""
    path = checkpoint_files.parse(f"tinker://{run_id}/{kind}/{name}")
    return File(path, "", (await access.describe_checkpoint(path)).manifest)


async def _signed(services: Services, asked: _Asked, expires: int, signature: str) -> File:
    """The file behind a link. Raises Forbidden."""
    file = await _find(services, asked)
    return services.url_signer.check(file, expires, signature, time.time())


async def _find(services: Services, asked: _Asked) -> File | None:
    try:
        path = checkpoint_files.parse(f"tinker://{asked.run_id}/{asked.kind}/{asked.name}")
        manifest = (await services.checkpoints.describe(path)).manifest
    except (NotFound, InvalidRequest):
        return None
    return File(path, asked.file, manifest) if not asked.file or asked.file in manifest.files else None


def _link(request: Request, services: Services, file: File, expires: int) -> str:
    headers = dict(request.headers)
    base = signed_urls.base_url(request.scope["scheme"], headers, request.scope.get("root_path", ""))
    if file.name:
        address = f"{FILES}/{signed_urls.quoted(file.path, file.name)}"
    else:
        address = f"{ARCHIVES}/{signed_urls.quoted(file.path, '').removesuffix('/')}"
    return f"{base}{PREFIX}{address}?{services.url_signer.query(file, expires)}"


def _answer(request: Request, services: Services, file: File, content: _Content) -> Response:
    """All of it, the part that is asked for, or that the client has it."""
    headers, size = dict(request.headers), download_content.size_of(content.parts)
    about = {"ETag": content.etag, "Accept-Ranges": "bytes", "Cache-Control": "private"}
    if byte_ranges.is_known(headers, content.etag):
        return Response(b"", status_code=HTTP_304_NOT_MODIFIED, headers=about, media_type=MediaType.TEXT)
    span = byte_ranges.wanted(headers, content.etag, size)
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
    span = span or byte_ranges.Span(0, size)
    about["Content-Length"] = str(span.end - span.start)
    about["Content-Disposition"] = f"attachment; filename*=UTF-8''{quote(content.name, safe='')}"
    read = partial(services.checkpoints.read, file.path, file.manifest)
    return Stream(
        download_content.pieces(content.parts, span, read),
        status_code=status,
        headers=about,
        media_type="application/octet-stream",
    )
