"""Counts the fields of a forward_backward body before it is parsed, and refuses far too many. Pure.

An empty message takes two bytes in a body and sixty in the parser's memory, and a body may unpack from next
to nothing. So a body with far more fields than any batch is refused while it is still bytes.
"""

from spmd_tx.coordinator.wire import tinker_pb2 as pb
from spmd_tx.errors import InvalidRequest

HARMLESS_BYTES = 1 << 20  # parsed within 50 ms, into 30 MiB at most
MAX_FIELDS = 1 << 18

_VARINT, _EIGHT_BYTES, _BYTES, _FOUR_BYTES = 0, 1, 2, 5
_DATA = pb.ForwardBackwardRequest.DESCRIPTOR.fields_by_name["data"].number


def check_fields(body: bytes) -> None:
    """Raise InvalidRequest for too many fields. A body that is no protobuf is left to the parser."""
    if len(body) <= HARMLESS_BYTES:
        return
    try:
        count = _count(body, 0, len(body), MAX_FIELDS, is_request=True)
    except IndexError:
        return
    if count > MAX_FIELDS:
        raise InvalidRequest(
            f"the body has more than {MAX_FIELDS} datums and pieces of datums; send fewer datums at once"
        )


def _count(body: bytes, place: int, end: int, limit: int, is_request: bool = False) -> int:
    """The number of fields between two offsets, with the fields of a request's datums.

    Counting stops beyond ``limit``.
    """
    count = 0
    while place < end and count <= limit:
        count += 1
        tag, place = _varint(body, place)
        kind = tag & 7
        if kind == _BYTES:
            size, place = _varint(body, place)
            if is_request and tag >> 3 == _DATA:
                count += _count(body, place, min(end, place + size), limit - count)
            place += size
        elif kind == _VARINT:
            _, place = _varint(body, place)
        elif kind == _EIGHT_BYTES:
            place += 8
        elif kind == _FOUR_BYTES:
            place += 4
        else:
            raise InvalidRequest("the body has protobuf groups, which no field of it is; send it without")
    return count


def _varint(body: bytes, place: int) -> tuple[int, int]:
    """The number at an offset, and the offset behind it."""
    value = body[place]
    place += 1
    if value < 128:  # nearly all
        return value, place
    value &= 127
    for shift in range(7, 70, 7):
        byte = body[place]
        place += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, place
    raise IndexError(place)
