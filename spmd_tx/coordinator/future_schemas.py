"""The wire format of what clients ask about many samples at once, and of clients that share a sampler."""

from typing import Annotated

import msgspec

from spmd_tx.coordinator.completions import SEQ_IDS_PER_CLIENT
from spmd_tx.coordinator.schemas import Number, Text

MOST_CLIENTS = 2**63 // SEQ_IDS_PER_CLIENT  # of one sampler, so that their requests' numbers fit into 64 bits

ClientNumber = Annotated[int, msgspec.Meta(ge=0, lt=MOST_CLIENTS)]


class SamplingSessionTarget(msgspec.Struct, frozen=True, tag="sampling_session"):
    """One client of a sampling session."""

    sampling_session_id: Text
    cloned_sampler_id: ClientNumber = 0


class RetrieveFuturesRequest(msgspec.Struct, frozen=True):
    target: SamplingSessionTarget
    prev_cursor: Number = 0  # of the last answer; what it told is not told again
    timeout: float | None = None  # seconds; 0: answer at once, None: wait as long as the server likes
    retrieved_request_ids: list[Text] = []  # whose results the client has


class FutureFinished(msgspec.Struct, frozen=True, tag="finished", tag_field="state", omit_defaults=True):
    request_id: str
    response_payload_uncompressed_size: int | None = None  # bytes


class FutureFailed(msgspec.Struct, frozen=True, tag="failed", tag_field="state"):
    request_id: str


class RetrieveFuturesResponse(msgspec.Struct, frozen=True):
    completions: list[FutureFinished | FutureFailed]
    cursor: int  # to be sent as prev_cursor the next time


class JoinSamplingSessionRequest(msgspec.Struct, frozen=True):
    sampling_session_id: Text


class JoinSamplingSessionResponse(msgspec.Struct, frozen=True, tag="join_sampling_session"):
    client_counter: int  # 1 or more; the client that made the sampling session is 0
