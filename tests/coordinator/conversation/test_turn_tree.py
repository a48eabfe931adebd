"""A conversation finds the turn that it goes on from, however its client writes it down."""

import json
from dataclasses import replace

import numpy as np
import pytest

from spmd_tx.coordinator.conversation.messages import Message, ToolCall
from spmd_tx.coordinator.conversation.turn_tree import Branch, BranchCause, TurnTree
from spmd_tx.coordinator.conversation.turns import SampledTurn, message_keys, own_key, settings_digest

SETTINGS = settings_digest([], {})
SYSTEM, USER = Message("system", "Be brief."), Message("user", "Hello")
ARGUMENTS = '{"path":"aü","n":1.0,"m":1e2}'


def sampled(tree, messages, message, id="r:0", settings=SETTINGS, **more):
    """Add what a model has said behind these messages, and return it."""
    place = tree.place(messages, settings)
    before = place.keys[-1].digest if place.keys else b""
    turn = SampledTurn(
        id=id,
        parent=place.parent,
        dropped=0,
        prompt=np.arange(3, dtype=np.int32),
        sampled=np.arange(2, dtype=np.int32),
        message=replace(message, turn_id=id),
        settings=settings,
        keys=(*place.new_keys, own_key(before, message)),
        stop="<|im_end|>",
        **more,
    )
    tree.add(turn)
    return turn


def said(text="Yes.", *calls, reasoning=""):
    return Message("assistant", text, reasoning, tuple(calls))


def call(id="call_1", arguments=ARGUMENTS, name="look"):
    return ToolCall(id, name, arguments)


@pytest.fixture
def tree():
    return TurnTree()


def place(tree, *messages, settings=SETTINGS):
    return tree.place(messages, settings)


@pytest.mark.parametrize(
    "sent",
    [
        said(" I look.\n", call(), reasoning="I think."),
        said("I look.", call()),
        said("I look.", call(arguments='{"path": "a\\u00fc", "n": 1, "m": 100}')),
        said("I look.", call(arguments={"m": 100.0, "n": 1, "path": "aü"})),
        said("I look.", call(id="other_1")),
        replace(said("I look.", call()), turn_id="r:0"),
    ],
    ids=["verbatim", "without reasoning", "rewritten arguments", "an object", "another id", "named"],
)
def test_a_turn_is_found_as_clients_send_it_back(tree, sent):
    turn = sampled(tree, [SYSTEM, USER], said("I look.", call(), reasoning="I think."))
    found = place(tree, SYSTEM, USER, sent, Message("tool", "seen", call_id=sent.calls[0].id))
    assert (found.parent, found.known) == (turn, 3)
    assert found.branch == Branch(BranchCause.CONTINUES)
    assert found.messages[2].reasoning == "I think."
    assert found.messages[2].calls[0] == ToolCall(sent.calls[0].id, "look", ARGUMENTS)


@pytest.mark.parametrize(
    "sent",
    [
        said("I looked.", call()),
        said("I look.", call(arguments='{"path":"b"}')),
        said("I look.", call(name="see")),
        said("I look."),
        said("I look.", call(), reasoning="I thought."),
    ],
)
def test_a_turn_that_its_client_has_edited_is_not_taken_for_what_was_sampled(tree, sent):
    sampled(tree, [USER], said("I look.", call(), reasoning="I think."))
    found = place(tree, USER, sent, Message("user", "Go on"))
    assert found.parent is None
    assert found.messages[1] == sent


def test_an_edited_message_is_named(tree):
    sampled(tree, [SYSTEM, USER], said())
    sampled(tree, [SYSTEM, USER, said(), Message("user", "And?")], said("No."), "s:0")
    found = place(tree, SYSTEM, USER, said(), Message("user", "Why?"))
    assert found.parent is tree.turns["r:0"]
    assert found.branch == Branch(BranchCause.EDITED, 3)
    assert place(tree, SYSTEM, Message("user", "Bye")).branch == Branch(BranchCause.EDITED, 1)


def test_ids_tell_turns_of_the_same_words_apart(tree):
    first = sampled(tree, [USER], said("", call("call_1")), "r:0")
    second = sampled(tree, [USER], said("", call("call_2")), "r:1")
    for turn in (first, second):
        sent = said("", call(turn.message.calls[0].id))
        assert place(tree, USER, sent).parent is turn
        assert place(tree, USER, replace(said("", call("x")), turn_id=turn.id)).parent is turn


def test_reasoning_tells_turns_of_the_same_words_apart(tree):
    for number in range(3):
        sampled(tree, [USER], said(reasoning=f"thought {number}"), f"r:{number}")
    assert place(tree, USER, said(reasoning="thought 1")).parent is tree.turns["r:1"]
    assert place(tree, USER, said()).parent is tree.turns["r:2"]


def test_the_path_counts_and_not_the_last_turn_alone(tree):
    for number in range(2):
        sampled(tree, [USER], said("", call(f"call_{number}")), f"r:{number}")
        known = [USER, said("", call(f"call_{number}")), Message("tool", "seen", call_id=f"call_{number}")]
        sampled(tree, known, said("Done."), f"s:{number}")
    for number in range(2):
        known = [USER, said("", call(f"call_{number}")), Message("tool", "seen", call_id=f"call_{number}")]
        assert (
            place(tree, *known, said("Done."), Message("user", "Thanks")).parent is tree.turns[f"s:{number}"]
        )


@pytest.mark.parametrize(
    ("messages", "settings", "cause"),
    [
        ([USER], SETTINGS, BranchCause.RETRY),
        ([Message("user", "Other")], SETTINGS, BranchCause.NEW),
        ([USER, said(), Message("user", "And?")], settings_digest([], {"x": 1}), BranchCause.TOOLS_CHANGED),
    ],
)
def test_a_root_says_why_it_is_one(tree, messages, settings, cause):
    assert place(tree, *messages).branch.cause is BranchCause.FIRST
    sampled(tree, [USER], said())
    found = place(tree, *messages, settings=settings)
    assert (found.parent, found.branch.cause) == (None, cause)


def test_a_turn_that_a_stop_string_ended_is_not_continued(tree):
    sampled(tree, [USER], said(), is_continuable=False)
    assert place(tree, USER, said(), USER).branch == Branch(BranchCause.STOPPED)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ([Message("developer", "Be brief."), USER], [SYSTEM, USER]),
        (
            [Message("system", "Be"), Message("system", "brief."), USER],
            [Message("system", "Be\n\nbrief."), USER],
        ),
        ([SYSTEM, Message("system", " "), USER], [SYSTEM, USER]),
        ([USER, said(), Message("system", ""), USER], [USER, said(), USER]),
    ],
)
def test_what_says_the_same_has_one_key(one, other):
    assert message_keys(one)[-1].digest == message_keys(other)[-1].digest


@pytest.mark.parametrize(
    "others",
    [
        [USER, said("", call("a"), call("b")), Message("tool", "1", call_id="b")],
        [USER, said("", call("a"), call("b")), Message("tool", "2", call_id="a")],
        [USER, said("", call("a", "{}"), call("b")), Message("tool", "1", call_id="a")],
        [Message("user", "Hello "), said("", call("a"), call("b")), Message("tool", "1", call_id="a")],
    ],
)
def test_what_says_something_else_has_another_key(others):
    messages = [USER, said("", call("a"), call("b")), Message("tool", "1", call_id="a")]
    assert message_keys(messages)[-1].digest != message_keys(others)[-1].digest


@pytest.mark.parametrize(
    "arguments", ["no json", "[" * 100_000, json.dumps({"n": 10**400}), '{"a": NaN}', "\ud800", '{"n":1e999}']
)
def test_odd_arguments_have_keys(tree, arguments):
    turn = sampled(tree, [USER], said("", call(arguments=arguments)))
    assert place(tree, USER, said("", call(arguments=arguments)), USER).parent is turn


def test_a_thousand_turns_of_the_same_words_are_told_apart(tree):
    for number in range(1024):
        sampled(tree, [USER], said("", call(f"call_{number}")), f"r:{number}")
    assert place(tree, USER, said("", call("call_500"))).parent is tree.turns["r:500"]
