"""How many fields a body of forward_backward has, counted before it is parsed.

Two bytes are a message, for which the parser takes sixty, and a body may unpack from next to nothing: what
has far more fields than any batch is refused while it is still bytes. Pure.
"""

from spmd_tx.coordinator.wire import tinker_pb2 as pb
from spmd_tx.errors import InvalidRequest

FEW_BYTES = 1 << 20  # that can do no harm: they are parsed within 50 ms, and take 30 MiB
MOST_FIELDS = 1 << 18

_VARINT, _EIGHT_BYTES, _BYTES, _FOUR_BYTES = 0, 1, 2, 5
_DATA = pb.ForwardBackwardRequest.DESCRIPTOR.fields_by_name["data"].number


def check_fields(body: bytes) -> None:
    """Raises InvalidRequest when there are too many. What is no protobuf is left to the parser."""
    if len(body) <= FEW_BYTES:
        return
    try:
        count = _count(body, 0, len(body), MOST_FIELDS, is_request=True)
    except IndexError:
        return
    if count > MOST_FIELDS:
        raise InvalidRequest(
            f"the body has more than {MOST_FIELDS} datums and pieces of datums; send fewer datums at once"
        )


def _count(body: bytes, place: int, end: int, room: int, is_request: bool = False) -> int:
    """The fields from a place on, of a request with those of its datums; none beyond ``room`` are counted."""
    count = 0
    while place < end and count <= room:
        count += 1
        tag, place = _varint(body, place)
        kind = tag & 7
        if kind == _BYTES:
            size, place = _varint(body, place)
            if is_request and tag >> 3 == _DATA:
                count += _count(body, place, min(end, place + size), room - count)
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
    """A number, and the place behind it."""
    byte = body[place]
    place += 1
    if byte < 128:
        return byte, place
    value, shift = byte & 127, 7
    while byte >= 128:
        byte = body[place]
        place += 1
        value |= (byte & 127) << shift
        shift += 7
        if shift > 70:
            raise IndexError(place)
    return value, place
