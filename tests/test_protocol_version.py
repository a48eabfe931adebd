"""Processes of two releases refuse each other: a message whose form changed has another protocol version."""

import hashlib
import json
from typing import Any

import msgspec
import numpy as np

from spmd_tx.protocol.agents import AnyAgentReport, AnyOrder
from spmd_tx.protocol.commands import LOSS_NAMES
from spmd_tx.protocol.envelope import Envelope
from spmd_tx.protocol.reports import PROTOCOL_VERSION, AnyReport
from spmd_tx.protocol.setup import Setup

FORMS = {27: "bec64d7bf9dbee80"}  # the digest of all messages, by protocol version


def form_of(kind: Any) -> dict[str, Any]:
    assert kind is np.ndarray, kind
    return {"type": "array"}


def without_words(value: Any) -> Any:
    """Drop descriptions and titles, which come from docstrings and names of classes."""
    match value:
        case dict():
            return {
                name: without_words(part)
                for name, part in value.items()
                if not (name in ("description", "title") and isinstance(part, str))
            }
        case list():
            return [without_words(part) for part in value]
    return value


def test_messages_have_the_forms_of_the_protocol_version():
    messages = (Setup | Envelope, AnyReport | AnyAgentReport, AnyOrder)
    schemas, parts = msgspec.json.schema_components(messages, schema_hook=form_of)
    forms = json.dumps(without_words([schemas, parts, LOSS_NAMES]), sort_keys=True)
    digest = hashlib.sha256(forms.encode()).hexdigest()[:16]
    assert {PROTOCOL_VERSION: digest} == FORMS, (
        "messages between processes have changed: raise PROTOCOL_VERSION in spmd_tx/protocol/reports.py, "
        "and write it here with the digest. Where only a type's name has changed, the digest is enough"
    )
