"""Routes to upload weights: start, a signed URL for each file, and finish."""

import re

from litestar import Controller, Request, Response, post, put
from litestar.enums import MediaType
from litestar.params import FromPath, JSONBody
from litestar.status_codes import HTTP_200_OK, HTTP_308_PERMANENT_REDIRECT

from spmd_tx.coordinator.http.authentication import SIGNED, STREAMED
from spmd_tx.coordinator.http.checkpoint_uploads import Sent
from spmd_tx.coordinator.http.services import ApiCall, Service, accepts_work
from spmd_tx.coordinator.training import validation
from spmd_tx.coordinator.wire.checkpoints import (
    ExternalWeightsUploadFinishRequest,
    ExternalWeightsUploadFinishResponse,
    ExternalWeightsUploadStartRequest,
    ExternalWeightsUploadStartResponse,
)
from spmd_tx.coordinator.wire.moments import write_moment
from spmd_tx.errors import InvalidRequest

PREFIX = "/api/v1"
FILE = "/uploads/{upload_id:str}/{file:str}"
RANGE = re.compile(r"bytes (?:\*|(?P<first>\d{1,18})-(?P<last>\d{1,18}))/(?P<total>\d{1,18})")
INCOMPLETE = HTTP_308_PERMANENT_REDIRECT  # as resumable uploads of Google's Cloud Storage use it


class UploadsController(Controller):
    @post("/external_weights_upload_start", status_code=HTTP_200_OK, guards=[accepts_work])
    async def start(
        self, data: JSONBody[ExternalWeightsUploadStartRequest], call: ApiCall
    ) -> ExternalWeightsUploadStartResponse:
        """Begin an upload. Its files are those that save_weights_external writes."""
        limits = call.services.bases.need(data.base_model).base.limits
        if not limits.max_rank:
            raise InvalidRequest(
                "uploads are LoRA adapters and this server trains all weights (--full-parameters); upload to "
                "one that trains adapters, or merge the adapter with spmd-tx export and serve the result"
            )
        adapter = validation.check_lora(data.lora_config, None, limits)
        owner, project = call.caller.owner, data.destination_project_id
        await call.services.quotas.check_session(call.caller, len(project or ""))
        upload = await call.services.uploads.begin(owner, data.base_model, adapter, project)
        address = PREFIX + FILE.replace("{upload_id:str}", upload.id)
        urls = {
            file: call.sign(address.replace("{file:str}", file), owner, upload.expires_at)
            for file in upload.most_bytes
        }
        expires = write_moment(upload.expires_at)
        return ExternalWeightsUploadStartResponse(upload.id, urls, expires)

    @put(
        FILE,
        status_code=HTTP_200_OK,
        guards=[accepts_work],
        opt=SIGNED | STREAMED,
        request_max_body_size=None,  # the upload knows how large the file can be
    )
    async def file(
        self, upload_id: FromPath[str], file: FromPath[str], request: Request, services: Service
    ) -> Response[bytes]:
        """Receive a file, or a part of it with Content-Range; say how much has arrived."""
        sent = _sent(dict(request.headers))
        if isinstance(sent, int):
            part = await services.uploads.part(upload_id, file, sent)
        else:
            part = await services.uploads.receive(upload_id, file, sent, request.stream())
        if part.is_whole:
            return Response(b"", media_type=MediaType.TEXT)
        headers = {"Range": f"bytes=0-{part.size - 1}"} if part.size else {}
        return Response(b"", status_code=INCOMPLETE, headers=headers, media_type=MediaType.TEXT)

    @post("/external_weights_upload_finish", status_code=HTTP_200_OK, guards=[accepts_work])
    async def finish(
        self, data: JSONBody[ExternalWeightsUploadFinishRequest], call: ApiCall
    ) -> ExternalWeightsUploadFinishResponse:
        """Check the files, and make a checkpoint of them. Repeated, it returns the same checkpoint."""
        path = await call.services.uploads.finish(data.upload_id, call)
        await call.note("checkpoint_uploaded", call.caller.owner, tinker_path=str(path))
        return ExternalWeightsUploadFinishResponse(str(path))


def _sent(headers: dict[str, str]) -> Sent | int:
    """Read what a request sends, or the size of a file of which it asks how much has arrived.

    Raises InvalidRequest.
    """
    if headers.get("content-encoding", "identity") != "identity":
        raise InvalidRequest(f"Content-Encoding is {headers['content-encoding']!r}; leave it out")
    length, md5 = headers.get("content-length", ""), headers.get("content-md5")
    text = headers.get("content-range")
    if text is None:
        return Sent(total=int(length) if length.isdigit() else None, md5=md5)
    match = RANGE.fullmatch(text)
    if match is None:
        raise InvalidRequest(
            f"Content-Range is {text!r}; send 'bytes FIRST-LAST/TOTAL', or 'bytes */TOTAL' to ask"
        )
    total = int(match["total"])
    if match["first"] is None:
        return total
    first, last = int(match["first"]), int(match["last"])
    if not first <= last < total:
        raise InvalidRequest(f"Content-Range is {text!r}; it must be first <= last < total")
    if length.isdigit() and int(length) != last - first + 1:
        raise InvalidRequest(f"Content-Range is {text!r}, and Content-Length is {length}; they do not agree")
    return Sent(first, last + 1, total, md5)
