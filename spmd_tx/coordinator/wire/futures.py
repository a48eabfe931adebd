"""The JSON of futures: poll one, poll all of a sampling client, cancel."""

from typing import Annotated

import msgspec

from spmd_tx.coordinator.wire.fields import NaturalNumber, Text

SEQ_IDS_PER_CLIENT = 1_000_000_000  # the SDK numbers requests so that they show which client copy sent them
MAX_CLIENTS = 2**63 // SEQ_IDS_PER_CLIENT  # of one sampler, so that request numbers fit into 64 bits

ClientNumber = Annotated[int, msgspec.Meta(ge=0, lt=MAX_CLIENTS)]


class SamplingSessionTarget(msgspec.Struct, frozen=True, tag="sampling_session"):
    """Names one client of a sampling session."""

    sampling_session_id: Text
    cloned_sampler_id: ClientNumber = 0


class RetrieveFuturesRequest(msgspec.Struct, frozen=True):
    target: SamplingSessionTarget
    prev_cursor: NaturalNumber = 0  # of the last answer; completions up to it are left out
    timeout: float | None = None  # seconds; 0: answer at once, None: wait as long as the server likes
    retrieved_request_ids: list[Text] = []  # requests whose results the client has


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


class FutureResponse(msgspec.Struct, frozen=True, omit_defaults=True):
    request_id: str
    model_id: str | None = None
    sample_sequence_ids: list[str] | None = None


class RetrieveFutureRequest(msgspec.Struct, frozen=True):
    request_id: Text
    allow_metadata_only: bool | None = None  # lets a server say how large a result is; all are sent whole


class CancelFutureRequest(msgspec.Struct, frozen=True):
    request_id: Text


class TryAgainResponse(msgspec.Struct, frozen=True, tag="try_again"):
    request_id: str
    queue_state: str
    queue_state_reason: str | None = None


class FailureResponse(msgspec.Struct, frozen=True):
    error: str
    category: str
