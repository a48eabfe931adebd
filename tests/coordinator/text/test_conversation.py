"""What a conversation says reaches the model, or is refused by name."""

import json

import pytest
from transformers import PreTrainedTokenizerFast

from spmd_tx.coordinator.text.chat_template import ChatTemplate
from spmd_tx.errors import InvalidRequest, NotRendered
from tests.support import chat_templates as released

USER = {"role": "user", "content": "hi"}
ARGUMENTS = {"city": "Zürich", "n": 3, "deep": {"a": [1.5, None, True]}}


@pytest.fixture
def render(tokenizer):
    def render(source, messages, **options):
        made = PreTrainedTokenizerFast(tokenizer_object=tokenizer, chat_template=source)
        return ChatTemplate(made).render(messages, options, 1 << 20, 10.0)

    return render


def called(*arguments, content=None, **more):
    calls = [
        {"id": f"call_{place}", "type": "function", "function": {"name": f"tool{place}", "arguments": each}}
        for place, each in enumerate(arguments)
    ]
    results = [
        {"role": "tool", "tool_call_id": call["id"], "content": f"result {call['id']}"} for call in calls
    ]
    return [USER, {"role": "assistant", "content": content, "tool_calls": calls, **more}, *results]


@pytest.mark.parametrize(
    "source, written",
    [
        (released.AS_ITEMS, '[tool0 city=Zürich n=3 deep={"a": [1.5, null, true]}]'),
        (
            released.AS_JSON,
            '{"name": "tool0", "arguments": {"city": "Zürich", "n": 3, "deep": {"a": [1.5, null, true]}}}',
        ),
        (released.AS_EITHER, 'tool0{"city": "Zürich", "n": 3, "deep": {"a": [1.5, null, true]}}'),
        (released.AS_STRINGS, 'tool0\n{"city": "Zürich", "n": 3, "deep": {"a": [1.5, null, true]}}\n'),
        (released.AS_THEY_COME, 'tool0({"city": "Zürich", "n": 3, "deep": {"a": [1.5, null, true]}})'),
        (released.MAPPINGS_ONLY, "tool0[('city', 'Zürich'), ('deep', {'a': [1.5, None, True]}), ('n', 3)]"),
    ],
)
@pytest.mark.parametrize("as_text", [False, True], ids=["mapping", "text"])
def test_arguments_reach_every_template_as_it_wants_them(render, source, written, as_text):
    given = json.dumps(ARGUMENTS, ensure_ascii=False) if as_text else ARGUMENTS
    assert render(source, called(given)) == f"<user>hi<assistant>{written}<tool>result call_0"


@pytest.mark.parametrize("nothing", ["", "  ", "{}", {}, None], ids=repr)
def test_a_call_may_have_no_arguments(render, nothing):
    for source in (released.AS_ITEMS, released.AS_JSON, released.AS_EITHER, released.MAPPINGS_ONLY):
        assert render(source, called(nothing)) == render(source, called({}))


@pytest.mark.parametrize(
    "broken", ['{"city": ', "[1]", "5", '{"a": NaN}', "plain", "[" * 100_000], ids=lambda x: x[:9]
)
def test_text_that_is_no_json_object_stays_text(render, broken):
    assert broken in render(released.AS_STRINGS, called(broken, "{}")).replace("\\", "")
    assert json.dumps(broken) in render(released.AS_JSON, called(broken))
    with pytest.raises(NotRendered, match=r"message 1: tool_calls\[0\].function.arguments is no JSON object"):
        render(released.AS_ITEMS, called(broken))


@pytest.mark.parametrize("value", [r'"\ud800"', "1e999"])
def test_values_that_no_text_or_number_holds_stay_as_they_were_written(render, value):
    given = f'{{"a": {value}}}'
    assert render(released.AS_EITHER, called(given)) == f"<user>hi<assistant>tool0{given}<tool>result call_0"
    with pytest.raises(NotRendered, match="is no JSON object"):
        render(released.AS_ITEMS, called(given))


@pytest.mark.parametrize("key", ["tool_calls", "name", "reasoning_content", "refusal"])
def test_null_means_the_same_as_a_missing_key(render, key):
    says = {"role": "assistant", "content": "yes"}
    for source in (released.AS_JSON, released.LATEST_REASONING):
        assert render(source, [USER, says | {key: None}]) == render(source, [USER, says])


@pytest.mark.parametrize(
    "source, messages, complaint",
    [
        (released.PLAIN, called({"a": 1}), r"message 1: .* leaves out tool_calls\[0\]; leave it out"),
        (released.FIRST_CALL, called({"a": 1}, {"b": 2}), r"message 1: .* leaves out tool_calls\[1\];"),
        (
            released.CALL_OR_CONTENT,
            called({}, content="I look"),
            "leaves out content beside tool_calls; send",
        ),
        (released.FOUR_ROLES, [USER, {"role": "usr", "content": "lost"}], "messages with the role 'usr'"),
        (released.AS_JSON, [USER | {"name": "Bob"}], "message 0: .* leaves out name; leave it out, or write"),
        (released.AS_JSON, [USER, {"role": "assistant", "refusal": "no"}], "leaves out refusal"),
        (released.AS_JSON, [USER, {"role": "assistant", "audio": {"id": "audio_1"}}], "leaves out audio.id"),
        (
            released.AS_JSON,
            [USER, {"role": "assistant", "content": "a", "prefix": True}],
            "leaves out prefix",
        ),
        (released.AS_JSON, [USER | {"weights": [{"text": "x"}]}], r"leaves out weights\[0\].text"),
        (
            released.AS_JSON,
            [USER, {"role": "assistant", "content": "", "function_call": {"name": "f", "arguments": "{}"}}],
            "leaves out function_call.name",
        ),
        *(
            (
                released.AS_JSON,
                [USER, {"role": "assistant", "content": "a", key: "thought"}],
                f"leaves out {key}",
            )
            for key in ("reasoning_content", "reasoning", "thinking")
        ),
    ],
)
def test_what_a_template_leaves_out_is_refused_by_name(render, source, messages, complaint):
    with pytest.raises(NotRendered, match=complaint):
        render(source, messages)


def test_a_text_that_stands_elsewhere_too_is_missed_all_the_same(render):
    with pytest.raises(NotRendered, match="leaves out name"):
        render(released.AS_JSON, [USER | {"name": "user"}])


def test_a_whole_message_that_is_written_as_json_loses_nothing(render):
    says = {"role": "assistant", "content": "a", "refusal": "no", "prefix": True, "thinking": "hm"}
    assert render("{{ messages | tojson }}", [USER, says]).count('"hm"') >= 1


@pytest.mark.parametrize("key", ["reasoning_content", "reasoning", "thinking"])
def test_reasoning_is_found_under_each_of_its_names(render, key):
    says = {"role": "assistant", "content": "yes", key: "I think"}
    assert render(released.LATEST_REASONING, [USER, says]) == "<user>hi<assistant>(I think)yes"
    both = says | {"reasoning_content": "I think", "reasoning": "I think"}
    assert render(released.LATEST_REASONING, [USER, both]) == "<user>hi<assistant>(I think)yes"


def test_what_a_template_drops_as_a_conversation_goes_on_is_its_own_rule(render):
    talk = [USER, {"role": "assistant", "content": "yes", "reasoning_content": "I think"}, USER]
    assert render(released.LATEST_REASONING, talk) == "<user>hi<assistant>yes<user>hi"


def test_developers_have_the_role_that_the_template_has_for_them(render):
    talk = [{"role": "developer", "content": "Be brief."}, USER]
    assert render(released.FOUR_ROLES, talk) == "<system>Be brief.<user>hi"
    knows = released.FOUR_ROLES.replace("'system'", "'developer'")
    assert render(knows, talk) == "<developer>Be brief.<user>hi"
    mentions = "{# for every developer #}" + released.FOUR_ROLES
    assert render(mentions, talk) == "<system>Be brief.<user>hi"


def test_an_id_says_nothing_to_a_model(render):
    talk = called({"a": 1})
    identified = [message | {"id": f"msg_{number}"} for number, message in enumerate(talk)]
    assert render(released.AS_JSON, identified) == render(released.AS_JSON, talk)


def test_the_name_of_a_result_stands_in_its_call(render):
    talk = called({"a": 1})
    named = [*talk[:-1], talk[-1] | {"name": "tool0"}]
    assert render(released.AS_JSON, named) == render(released.AS_JSON, talk)


@pytest.mark.parametrize("key", ["name", "description"])
def test_tools_are_told_of_or_refused(render, key):
    function = {"name": "weather", "description": "How warm it is", "parameters": {"type": "object"}}
    tools = [{"type": "function", "function": function}]
    shows = "{% for tool in tools %}{{ tool.function | tojson }}{% endfor %}" + released.AS_JSON
    assert json.dumps(function) in render(shows, [USER], tools=tools)
    hides = shows.replace(
        "tool.function | tojson", f"tool.function.{'description' if key == 'name' else 'name'}"
    )
    with pytest.raises(NotRendered, match=rf"leaves out tools\[0\].function.{key}"):
        render(hides, [USER], tools=tools)


def test_an_error_of_the_template_is_the_first_one(render):
    source = released.AS_ITEMS.replace(
        "<", "{% if messages | length > 2 %}{{ raise_exception('too many') }}{% endif %}<", 1
    )
    with pytest.raises(InvalidRequest, match="cannot render this conversation: too many"):
        render(source, called({"a": 1}))
