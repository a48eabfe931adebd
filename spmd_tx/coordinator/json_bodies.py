"""Requests and results whose bodies are JSON."""

from typing import TypeVar

import msgspec

from spmd_tx.coordinator.request_records import Finished
from spmd_tx.coordinator.wire.training_protobuf import JSON
from spmd_tx.errors import InvalidRequest

Body = TypeVar("Body", bound=msgspec.Struct)


def read_body(body: bytes, schema: type[Body]) -> Body:
    """Raises InvalidRequest when it does not parse."""
    try:
        return msgspec.json.decode(body, type=schema)
    except msgspec.DecodeError as problem:
        raise InvalidRequest(f"the request does not parse: {problem}") from None


def json_result(result: msgspec.Struct) -> Finished:
    return Finished(JSON, msgspec.json.encode(result))
