"""What rows of turns hold: the messages and tokens of a prompt, and what was sampled behind it. Pure."""

import json
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple, TypeVar

import msgspec
import numpy as np
import zstandard

from spmd_tx.coordinator.conversation.messages import Message, MessageImage, Tool, ToolCall
from spmd_tx.coordinator.wire.sampling_protobuf import SampledSequence, SampledSequences
from spmd_tx.errors import UNREADABLE, DamagedBody

TurnState = Literal["open", "sampled", "failed", "cut"]  # cut: its client has hung up

Stored = TypeVar("Stored", bound=msgspec.Struct)


def encode_conversation(
    messages: Sequence[Message], tools: Sequence[Tool], variables: Mapping[str, Any]
) -> str:
    """Write down what a client has sent. JSON, since it may hold what no other format takes."""
    written = [
        {**vars(each), "calls": [vars(call) for call in each.calls], "images": [*map(vars, each.images)]}
        for each in messages
    ]
    whole = {"messages": written, "tools": [vars(each) for each in tools], "variables": variables}
    return json.dumps(whole)


class ConversationRecord(NamedTuple):
    """Holds what a client has sent."""

    messages: list[Message]
    tools: tuple[Tool, ...]
    variables: dict[str, Any]  # of the chat template


def decode_conversation(text: str) -> ConversationRecord:
    """Read what ``encode_conversation`` has written."""
    read = json.loads(text)
    messages = [
        Message(
            **{
                **each,
                "calls": tuple(ToolCall(**call) for call in each["calls"]),
                "images": tuple(MessageImage(**image) for image in each.get("images", ())),
            }
        )
        for each in read["messages"]
    ]
    return ConversationRecord(messages, tuple(Tool(**each) for each in read["tools"]), read["variables"])


class TurnPrompt(msgspec.Struct, frozen=True, kw_only=True):
    """Holds what the prompt of a turn adds to the turn that it goes on from."""

    conversation: str  # its messages behind that turn, tools and variables (decode_conversation)
    stops: list[str]
    most_calls: int | None
    settings: bytes
    keys: list[bytes]  # of these messages
    last_key: bytes  # of the last message of the conversation
    begun: str  # the end of the prompt's text
    tokens: bytes  # int32
    dropped: int  # last tokens of the turn before that the prompt leaves out
    has_own_instructions: bool = False  # as Conversation has it; of a prompt that goes on from no turn


class TurnSamples(msgspec.Struct, frozen=True):
    """Holds all samples of a turn's request."""

    tokens: list[bytes]  # int32
    logprobs: list[bytes]  # float32, nats
    stops: list[str]  # "stop" or "length", "" if it was cut
    forced: list[bytes] = []  # bool, of samples with a grammar; empty where it left a choice of all tokens

    def of_sample(self, number: int) -> tuple[np.ndarray, np.ndarray]:
        """Return tokens and log-probabilities [N] of one sample."""
        return np.frombuffer(self.tokens[number], "<i4"), np.frombuffer(self.logprobs[number], "<f4")

    def forced_of(self, number: int) -> np.ndarray:
        """Return which tokens [N] of a sample were forced."""
        marks = self.forced[number] if self.forced else b""
        return np.frombuffer(marks, bool) if marks else np.zeros(len(self.tokens[number]) // 4, bool)


class PartialTurn(NamedTuple):
    """Holds what is drawn of a sample."""

    tokens: list[int]
    logprobs: list[float]
    forced: list[bool]
    stop_reason: str = ""  # as in TurnSamples


class EncodedSamples(NamedTuple):
    """Holds samples with their counts of tokens, by the names of a row's columns."""

    samples: bytes
    sampled: int
    cached: int  # of the prompt


def encode(content: msgspec.Struct) -> bytes:
    """Return the bytes of a row's content."""
    return zstandard.ZstdCompressor(level=1, write_checksum=True).compress(msgspec.msgpack.encode(content))


def decode(contents: bytes, kind: type[Stored]) -> Stored:
    """Read what ``encode`` has written. Raises DamagedBody."""
    try:
        return msgspec.msgpack.decode(zstandard.ZstdDecompressor().decompress(contents), type=kind)
    except (zstandard.ZstdError, *UNREADABLE) as error:
        raise DamagedBody(f"a turn of a trajectory cannot be read: {error}; delete the trajectory") from error


def samples_of(body: bytes) -> EncodedSamples:
    """Encode the result of a sample request."""
    result = SampledSequences(body)
    sequences = list(result)
    sampled = sum(len(each.tokens) for each in sequences)
    return EncodedSamples(encode_samples(sequences), sampled, result.cache_hits)


def encode_samples(samples: Sequence[SampledSequence | PartialTurn]) -> bytes:
    """Encode samples."""
    has_forced = any(each.forced for each in samples)
    return encode(
        TurnSamples(
            [np.asarray(each.tokens, "<i4").tobytes() for each in samples],
            [np.asarray(each.logprobs, "<f4").tobytes() for each in samples],
            [each.stop_reason for each in samples],
            [np.asarray(each.forced, bool).tobytes() for each in samples] if has_forced else [],
        )
    )
