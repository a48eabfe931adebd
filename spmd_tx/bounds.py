"""The bounds on what clients may ask for, in one table, which docs/limits.md shows and operators can change.

A field says its meaning and its default; its unit is in its name or its meaning. A bound protects the server
and other tenants; what a request means never depends on it.
"""

import difflib
import math
from collections.abc import Mapping
from typing import Annotated, NamedTuple

import msgspec

from spmd_tx.byte_sizes import parse_size
from spmd_tx.errors import StartError
from spmd_tx.options import FROM_ZERO, MANY, Accepts, declared

# The maximum of whole numbers without one of their own: what databases can work with. Of others it is MANY.
MOST_WHOLE = 2**63 - 1


class Bounds(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Holds the bounds, which ``--limit NAME=VALUE`` or the table ``[limits]`` of a TOML file can change.

    Whole numbers are at least 1, unless a mark says otherwise, and others above 0.
    """

    stop_strings: Annotated[int, "Stop strings of a sample request.", FROM_ZERO] = 64
    stop_string_bytes: Annotated[int, "Bytes of one stop string, in UTF-8."] = 1024
    stop_tokens: Annotated[int, "Stop tokens of a sample request.", FROM_ZERO] = 1024

    prompt_text_bytes: Annotated[
        int, "Bytes of text in the prompts, or messages, of a call to OpenAI's API.", Accepts(least=1 << 10)
    ] = 4 << 20
    tools_bytes: Annotated[int, "Bytes of the tools of a chat, as JSON.", Accepts(least=1 << 10)] = 1 << 20
    grammar_bytes: Annotated[
        int, "Bytes of the grammar of an answer, with the schemas in it.", Accepts(least=1 << 10)
    ] = 256 << 10
    text_seconds: Annotated[float, "Seconds that rendering and tokenizing such a text may take."] = 30.0
    text_memory_bytes: Annotated[int, "Memory for that, in a separate process.", Accepts(least=512 << 20)] = (
        3 << 30
    )

    images: Annotated[int, "Images of a sample request or of a conversation."] = 64
    image_bytes: Annotated[int, "Bytes of the file of one image.", Accepts(least=1 << 10)] = 16 << 20
    image_pixels: Annotated[int, "Pixels of one image, as it is sent."] = 50_000_000
    image_tokens_each: Annotated[int, "Tokens of one image; the context bounds them, too."] = 16_384
    image_seconds: Annotated[float, "Seconds that decoding an image may take."] = 20.0
    image_memory_bytes: Annotated[
        int, "Memory for that, in a separate process.", Accepts(least=512 << 20)
    ] = 2 << 30

    turn_memory_bytes: Annotated[
        int,
        "Memory for turns that were sampled, so that conversations go on from their tokens; those of "
        "trajectories have as much again.",
        FROM_ZERO,
    ] = 64 << 20
    trajectories: Annotated[int, "Trajectories of one owner; further ones are refused."] = 100_000
    turns_per_trajectory: Annotated[int, "Turns of one trajectory; further ones are refused."] = 1024
    trajectory_bytes: Annotated[
        int,
        "Bytes of one trajectory's prompts and samples; further turns are refused.",
        Accepts(least=64 << 10),
    ] = 256 << 20
    trajectory_days: Annotated[
        float, "Days for which a trajectory is kept after its last use; training is one."
    ] = 7.0

    open_sessions: Annotated[int, "Open sessions of one owner; further ones are refused."] = 1000
    sessions_per_day: Annotated[int, "Sessions that one owner may create per day, also all at once."] = 10_000
    metadata_bytes_per_day: Annotated[
        int,
        "Bytes of labels and metadata of the sessions and models that one owner creates in a day, as JSON.",
        Accepts(least=1 << 20),
    ] = 256 << 20
    models_per_session: Annotated[int, "Models of one session: their `model_seq_id` is below it."] = 10_000
    samplers_per_session: Annotated[
        int, "Samplers of one session: their `sampling_session_seq_id` is below it."
    ] = 1_000_000
    custom_losses_per_session: Annotated[
        int, "Custom losses of one session: their `custom_loss_seq_id` is below it."
    ] = 10_000
    checkpoint_bytes: Annotated[
        int,
        "Bytes of one owner's checkpoints, beyond which saves are refused; 0: no limit but the disk.",
        FROM_ZERO,
    ] = 0

    open_uploads: Annotated[int, "Unfinished uploads of weights of one owner."] = 16

    polls: Annotated[int, "Polls of one owner that wait at a time; further ones get 429."] = 4096
    polls_per_second: Annotated[
        int,
        "Heartbeats, polls and telemetry per second with one key; ten seconds' worth may arrive at "
        "once. With `--requests-per-second R`, at most 20 + 10 R.",
    ] = 1000

    answer_bytes: Annotated[
        int,
        "Bytes at which a page of a listing ends: of runs, checkpoints, sessions, metrics, usage or "
        "audit entries.",
        Accepts(least=64 << 10),
    ] = 8 << 20
    answers_waiting: Annotated[
        int,
        "Listings and pages of the console that one owner waits for: they are made one after the other. "
        "Further ones get 429.",
    ] = 64
    answers_at_once: Annotated[int, "Such answers that are made at a time, of all owners together."] = 4
    answer_send_seconds: Annotated[float, "Seconds within which a client must read such an answer."] = 120.0
    search_seconds: Annotated[
        float, "Seconds that one page of a search takes; the next page goes on from there."
    ] = 2.0
    console_streams: Annotated[int, "Open pages of the console that one owner has a stream of news for."] = (
        256
    )
    console_streams_in_all: Annotated[
        int, "Such streams of all owners together; further pages ask every few seconds."
    ] = 1024

    metric_name_characters: Annotated[
        int, "Characters of the name of a metric that a client sends.", Accepts(most=1000)
    ] = 256
    metric_names: Annotated[int, "Different metrics that clients send about one run."] = 1000
    metrics_bytes_per_day: Annotated[
        int,
        "Bytes of metrics that the clients of one owner send in a day, as they are stored.",
        Accepts(least=1 << 20),
    ] = 1 << 30

    seq_ids_ahead: Annotated[
        int, "How far a training request's `seq_id` may be ahead of its model's others."
    ] = 1_000_000

    age_recipients: Annotated[int, "Keys that an export is encrypted to."] = 10
    age_recipient_characters: Annotated[int, "Characters of one such key.", Accepts(least=62)] = 4096

    connections: Annotated[
        int, "Client connections at a time; fewer if the system's limit of open files is low."
    ] = 16_384
    connections_per_address: Annotated[
        int, "Connections from one address, which may be a proxy; at most 3/4 of all."
    ] = 4096

    body_seconds: Annotated[float, "Seconds within which a whole body must arrive."] = 300.0
    body_piece_seconds: Annotated[float, "Seconds within which the next part of a body must arrive."] = 30.0
    body_grace_seconds: Annotated[
        float, "Seconds during which a body above 64 KiB may arrive at any speed."
    ] = 10.0
    body_bytes_per_second: Annotated[
        int, "Bytes of such a body that must arrive per second, on average, after that."
    ] = 64 << 10
    body_room_seconds: Annotated[float, "Seconds that a body waits for memory before it gets 503."] = 60.0
    body_patience_seconds: Annotated[
        float, "Seconds it waits before bodies of owners with more than an even share are dropped."
    ] = 1.0
    prompt_body_bytes: Annotated[
        int, "Bytes of the body of a sample request; for training it is 64 MiB.", Accepts(least=1 << 10)
    ] = 8 << 20
    image_prompt_body_bytes: Annotated[
        int,
        "Bytes of the body of a sample request where one of the server's models takes images.",
        Accepts(least=1 << 10),
    ] = 32 << 20
    plain_body_bytes: Annotated[
        int, "Bytes of the body of any other request that changes something.", Accepts(least=1 << 10)
    ] = 1 << 20
    bodies_bytes: Annotated[
        int, "Bytes of all bodies that are being received or handled.", Accepts(least=1 << 20)
    ] = 192 << 20
    reading_bodies_bytes: Annotated[
        int,
        "Bytes of bodies of requests that change nothing; these do not count there.",
        Accepts(least=1 << 20),
    ] = 16 << 20
    reading_body_bytes: Annotated[
        int, "Bytes of one body of a request that changes nothing, such as telemetry.", Accepts(least=1 << 10)
    ] = 1 << 20

    answers_bytes: Annotated[
        int,
        "Bytes of the results that calls of OpenAI's API are sent, without those of up to 64 KiB; one "
        "owner has at most half.",
        Accepts(least=1 << 20),
    ] = 128 << 20

    custom_loss_datum_operations: Annotated[
        int, "Operations of a custom loss on one datum, without its gradient."
    ] = 10_000_000_000
    custom_loss_operations: Annotated[int, "Operations of a custom loss on all datums of a request."] = (
        1_000_000_000_000
    )
    custom_loss_programs: Annotated[int, "Programs that a custom loss is compiled into for one request."] = 64
    custom_loss_compile_seconds: Annotated[float, "Seconds for compiling a custom loss for one request."] = (
        120.0
    )
    custom_loss_run_seconds: Annotated[float, "Seconds for running a custom loss for one request."] = 300.0
    custom_loss_processes: Annotated[
        int, "Processes that run custom losses at the same time.", Accepts(most=64)
    ] = 2
    custom_loss_memory_bytes: Annotated[int, "Memory of one of these processes.", Accepts(least=1 << 30)] = (
        8 << 30
    )


class Reach(NamedTuple):
    """Holds the range of values that a bound can have."""

    least: float
    most: float  # inf: as much as there can be
    is_whole: bool
    is_open: bool  # whether ``least`` itself is excluded

    def __contains__(self, value: object) -> bool:
        return isinstance(value, int | float) and (
            (self.least < value if self.is_open else self.least <= value)
            and value <= min(self.most, MOST_WHOLE if self.is_whole else MANY)
        )

    def __str__(self) -> str:
        beyond = f"{'more than' if self.is_open else 'at least'} {self.least:,}"
        return beyond if self.most == math.inf else f"{beyond}, at most {self.most:,}"


def bounds_of(values: Mapping[str, str]) -> Bounds:
    """Return the default bounds with some values replaced, written as numbers or sizes. Raises StartError."""
    return msgspec.structs.replace(Bounds(), **{name: _number(name, text) for name, text in values.items()})


def reaches() -> dict[str, Reach]:
    """Return the range of each bound, by name."""
    found = {}
    for name, option in declared(Bounds):
        is_whole, (least, most, *_) = option.type is int, option.accepts
        most = math.inf if most == MANY else most
        found[name] = Reach(least if is_whole else 0, most, is_whole, is_open=not is_whole)
    return found


def _number(name: str, text: str) -> float:
    known = reaches()
    if name not in known:
        near = difflib.get_close_matches(name, known, n=1)
        hint = f"did you mean {near[0]}?" if near else "docs/limits.md lists them"
        raise StartError(f"--limit {name}={text} sets no limit that is known; {hint}")
    reach, is_whole = known[name], known[name].is_whole
    is_size = name.endswith("_bytes")
    try:
        number = parse_size(text, whole=0) if is_size else int(text) if is_whole else float(text)
    except (ValueError, OverflowError):
        number = math.nan
    if number not in reach:
        kind = "a whole number" if is_whole else "a number"
        size = ", or a size as 64MiB" if is_size else ""
        most = "" if reach.most < math.inf else f", at most {MOST_WHOLE if is_whole else MANY}"
        raise StartError(f"--limit {name}={text} is not possible; it must be {kind}{size}, {reach}{most}")
    return number
