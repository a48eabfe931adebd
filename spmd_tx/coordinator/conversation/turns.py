"""What a sampled turn is, and the keys by which messages of conversations are compared. Pure.

Clients send back what they were told, but rarely as it was: arguments are written anew, reasoning is left
out, outer blanks are cut off. So a key covers what a message means, not how it is written. The key of a
message covers all messages before it, too.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, NamedTuple

import msgspec
import numpy as np

from spmd_tx.coordinator.conversation.messages import ASSISTANT, INSTRUCTING, SYSTEM, Message, ToolCall

KEY_BYTES = 16
TEXT_BYTES = 4  # of a character; those of images have one
TURN_BYTES = 512  # of a turn without its texts and tokens, about
BETWEEN = "\n\n"  # system messages that become one
EXACT = 1 << 53  # integers beyond it are rounded by clients in JavaScript


@dataclass(frozen=True, eq=False)
class SampledTurn:
    """Holds a message that a model has sampled, with its tokens and those of its prompt."""

    id: str  # REQUEST:NUMBER, as training names a sample
    parent: SampledTurn | None  # with whose tokens its prompt begins
    dropped: int  # last tokens of the parent that the prompt leaves out
    prompt: np.ndarray  # int32 [N]: the rest of the prompt
    sampled: np.ndarray  # int32 [N]
    message: Message  # as clients are told
    settings: bytes  # digest of all else that the prompt was made of: tools, variables of the template
    keys: tuple[bytes, ...]  # of all messages behind the parent, its own last
    stop: str | None  # the special token that ends it; None: it was cut
    is_continuable: bool = True  # False: it has tokens that its client has not seen
    asked: tuple[Message, ...] | None = None  # the messages behind the parent's; None: they are not kept

    @property
    def key(self) -> bytes:
        return self.keys[-1]

    def path(self) -> Iterator[SampledTurn]:
        """Yield this turn and those that it goes on from, the newest first."""
        at: SampledTurn | None = self
        while at is not None:
            yield at
            at = at.parent

    @property
    def size(self) -> int:
        """Bytes that it takes, about."""
        texts = sum(_length(each) for each in (self.message, *(self.asked or ())))
        return (
            TURN_BYTES + self.prompt.nbytes + self.sampled.nbytes + TEXT_BYTES * texts + 100 * len(self.keys)
        )


def _length(message: Message) -> int:
    """Return the characters of a message, about, with images as texts of as many bytes."""
    calls = sum(len(call.name) + len(str(call.arguments)) for call in message.calls)
    images = sum(len(image.data) for image in message.images) // TEXT_BYTES
    return len(message.text) + len(message.reasoning) + calls + images


def conversation_of(turn: SampledTurn) -> tuple[Message, ...] | None:
    """Return the conversation that ends with a turn; None if not all of it is kept."""
    messages = list[Message]()
    for at in turn.path():
        if at.asked is None:
            return None
        messages += [at.message, *reversed(at.asked)]
    return tuple(reversed(messages))


class MessageKey(NamedTuple):
    """Names a message together with all before it."""

    digest: bytes
    place: int  # of the message in its conversation; of several that count as one, the last
    is_assistant: bool


def message_keys(messages: Sequence[Message]) -> list[MessageKey]:
    """Return the keys of a conversation. Instructions that say nothing have none."""
    keys, chain, places = list[MessageKey](), b"", dict[str | None, int]()
    for place, message in _leading_joined(messages):
        if message.role in INSTRUCTING and not message.text.strip():
            continue
        content = msgspec.msgpack.encode(_meaning(message, places))
        chain = blake2b(chain + content, digest_size=KEY_BYTES).digest()
        keys.append(MessageKey(chain, place, message.role == ASSISTANT))
        if message.calls:
            places = {call.id: number for number, call in enumerate(message.calls)}
    return keys


def own_key(before: bytes, message: Message) -> bytes:
    """Return the key of a message behind others, whose last key is ``before``."""
    content = msgspec.msgpack.encode(_meaning(message, {}))
    return blake2b(before + content, digest_size=KEY_BYTES).digest()


def settings_digest(tools: Sequence[Any], options: Mapping[str, Any]) -> bytes:
    """Return a digest of tools and variables of the template, which do not depend on order."""
    text = json.dumps([tools, options], sort_keys=True, default=repr)
    return blake2b(text.encode(errors="surrogatepass"), digest_size=KEY_BYTES).digest()


def _leading_joined(messages: Sequence[Message]) -> Iterator[tuple[int, Message]]:
    count = next((at for at, each in enumerate(messages) if each.role not in INSTRUCTING), len(messages))
    texts = [each.text for each in messages[:count] if each.text.strip()]
    if texts:
        yield count - 1, Message(SYSTEM, BETWEEN.join(texts))
    yield from enumerate(messages[count:], count)


def _meaning(message: Message, places: Mapping[str | None, int]) -> Any:
    """Return what clients keep of a message. Results belong to calls by their places."""
    role = SYSTEM if message.role in INSTRUCTING else message.role
    others = json.dumps(message.others, sort_keys=True, default=repr) if message.others else ""
    if role != ASSISTANT:
        call = places.get(message.call_id, message.call_id)
        place = _encodable(call) if isinstance(call, str) else call
        images = [[[each.at, each.digest] for each in message.images]] if message.images else []
        return [_encodable(role), _encodable(message.text), place, _encodable(others), *images]
    calls = [[_encodable(call.name), arguments_key(call)] for call in message.calls]
    return [role, _encodable(message.text.strip()), calls, _encodable(others)]


def arguments_key(call: ToolCall) -> bytes:
    """Return arguments in one spelling: numbers count by value, and the order of keys does not."""
    arguments = call.arguments
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}")
        except (ValueError, RecursionError):
            return _encodable(str(arguments).strip())
    try:
        return json.dumps(_by_value(arguments), sort_keys=True).encode()
    except RecursionError:
        return _encodable(str(call.arguments))


def _by_value(value: Any) -> Any:
    match value:
        case dict():
            return {key: _by_value(each) for key, each in value.items()}
        case list():
            return [_by_value(each) for each in value]
        case float() if value.is_integer():
            return int(value)
        case int() if not isinstance(value, bool) and abs(value) > EXACT:
            return int(float(value)) if abs(value) < 1 << 1000 else str(value)
        case _:
            return value


def _encodable(text: str) -> bytes:
    return text.encode(errors="surrogatepass")
