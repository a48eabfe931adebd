"""Reads answers in tests, whole or in random pieces."""

import random
from itertools import pairwise

from spmd_tx.coordinator.conversation.messages import Tool
from spmd_tx.coordinator.text.replies import reply_reader
from spmd_tx.coordinator.text.reply_events import Reasoning, ReplyCall, ReplyContent

SCHEMA = {
    "type": "object",
    "properties": {
        "path": {"type": "string"},
        "n": {"type": "integer"},
        "x": {"type": "number"},
        "deep": {"type": "boolean"},
        "list": {"type": "array"},
        "edit": {"$ref": "#/$defs/Edit"},
        "note": {"anyOf": [{"type": "string"}, {"type": "null"}]},
    },
    "$defs": {"Edit": {"type": "object"}},
}
TOOLS = [
    Tool("look", "Look.", SCHEMA),
    Tool("now", "Say what time it is.", {"type": "object", "properties": {}}),
]


def joined(events):
    """Neighbouring pieces of the same kind as one; (kind, text) or (name, arguments) each."""
    found = []
    for event in events:
        if isinstance(event, ReplyCall):
            found.append((event.name, event.arguments))
            continue
        kind = type(event)
        if found and found[-1][0] is kind:
            found[-1] = (kind, found[-1][1] + event.text)
        else:
            found.append((kind, event.text))
    return found


def read(format, pieces, prompt="", tools=TOOLS):
    """What an answer consists of, and its status."""
    reader = reply_reader(format, prompt, tools)
    events = [event for piece in pieces for event in reader.feed(piece)]
    return joined([*events, *reader.end()]), str(reader.status)


def cut(text, seed):
    """Cut a text at random places."""
    draw = random.Random(seed)
    places = sorted(draw.choices(range(len(text) + 1), k=draw.randrange(1, 12)))
    return [text[a:b] for a, b in pairwise([0, *places, len(text)])]


def thought(text):
    return (Reasoning, text)


def said(text):
    return (ReplyContent, text)
