import json

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from spmd_tx.coordinator.text.chat_template import NOT_FOR_CLIENTS, ChatTemplate
from spmd_tx.coordinator.text.model_text import load_model_text
from spmd_tx.demo import tiny_model
from spmd_tx.errors import InvalidRequest
from tests.support import chat_templates

HELLO = [{"role": "user", "content": "Hello <you>"}]
TALK = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "How warm is it in Zürich?"},
    {
        "role": "assistant",
        "content": "",
        "reasoning_content": "I have to look.",
        "tool_calls": [
            {"type": "function", "function": {"name": "weather", "arguments": {"city": "Zürich"}}}
        ],
    },
    {"role": "tool", "content": '{"celsius": 7}', "name": None},
    {"role": "assistant", "content": "<think>\nCold.\n</think>\n\n7 °C"},
    {"role": "user", "content": "And < tomorrow >?"},
]
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "How warm it is",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
        },
    }
]


def without(messages, *keys):
    return [{key: value for key, value in each.items() if key not in keys} for each in messages]


@pytest.fixture
def make(tokenizer):
    """A tokenizer of transformers with this template."""

    def make(source, **more):
        return PreTrainedTokenizerFast(
            tokenizer_object=tokenizer, chat_template=source, bos_token="<s>", eos_token="</s>", **more
        )

    return make


@pytest.fixture
def render(make):
    def render(source, most_characters=1000, seconds=10.0, **options):
        return ChatTemplate(make(source)).render(HELLO, options, most_characters, seconds)

    return render


@pytest.mark.parametrize(
    "source, talk, options",
    [
        (chat_templates.QWEN3, TALK, {}),
        (chat_templates.QWEN3, TALK, {"tools": TOOLS, "enable_thinking": False}),
        (chat_templates.LLAMA3, without(TALK, "reasoning_content"), {}),
        (
            chat_templates.LLAMA3,
            without(TALK, "reasoning_content"),
            {"tools": TOOLS, "date_string": "1 May", "bos_token": "<another>"},
        ),
        (chat_templates.PLAIN, without(TALK, "reasoning_content", "tool_calls"), {}),
        (
            chat_templates.PLAIN,
            without(TALK, "reasoning_content", "tool_calls"),
            {"documents": [{"title": "A", "text": "B"}]},
        ),
        (tiny_model.CHAT_TEMPLATE, without(TALK, "reasoning_content", "tool_calls"), {}),
    ],
)
def test_a_prompt_is_that_of_transformers(make, source, talk, options):
    tokenizer = make(source)
    wanted = tokenizer.apply_chat_template(talk, tokenize=False, add_generation_prompt=True, **options)
    assert ChatTemplate(tokenizer).render(talk, options, 10_000, 10.0) == wanted


def test_tools_choose_the_template_for_tools(make):
    hello = "{{ messages[0].content }}"
    template = ChatTemplate(make({"default": hello, "tool_use": "{{ tools | tojson | length }} " + hello}))
    assert template.render(HELLO, {}, 1000, 10.0) == "Hello <you>"


def test_a_conversation_ends_where_the_assistant_begins(render):
    wanted = "<|im_start|>user\nHello <you><|im_end|>\n<|im_start|>assistant\n"
    assert render(tiny_model.CHAT_TEMPLATE) == wanted


@pytest.mark.parametrize(
    "source, text",
    [
        ("{{ bos_token }}", "<s>"),
        ("{{ messages | tojson }}", '[{"role": "user", "content": "Hello <you>"}]'),
        ("{% for m in messages %}{% break %}{% endfor %}x", "x"),
        ("{% generation %}{{ messages[0].role }}{% endgeneration %}", "user"),
        ("{{ strftime_now('%Y') | length }}", "4"),
        ("{{ add_generation_prompt }}", "True"),
    ],
)
def test_templates_find_what_transformers_gives_them(render, source, text):
    assert render(source + "{{ messages[0].content }}", add_generation_prompt=True) == text + "Hello <you>"


@pytest.mark.parametrize("options, text", [({}, "True"), ({"enable_thinking": False}, "False")], ids=str)
def test_variables_of_the_template_are_those_of_the_client(render, options, text):
    source = "{{ enable_thinking | default(true) }} {{ messages[0].content }}"
    assert render(source, **options) == f"{text} Hello <you>"


@pytest.mark.parametrize(
    "source, complaint",
    [
        (None, r"no chat template.*chat_template\.jinja"),
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[0].content + 1 }}", "cannot render"),
        ("{% if %}", "cannot render"),
        ("{{ messages.append(1) }}", "cannot render"),
        ("{{ ''.__class__.__mro__ }}", "cannot render"),
        ("{% macro again() %}{{ again() }}{% endmacro %}{{ again() }}", "cannot render"),
    ],
)
def test_what_cannot_be_rendered_is_refused(render, source, complaint):
    with pytest.raises(InvalidRequest, match=complaint):
        render(source)


@pytest.mark.parametrize("options", [{"tools": "all"}, {"documents": ["text"]}], ids=str)
def test_what_transformers_refuses_is_refused(render, options):
    with pytest.raises(InvalidRequest, match=r"cannot render this conversation: .*; change messages"):
        render("{{ messages }}{{ tools }}{{ documents }}", **options)


@pytest.mark.parametrize(
    "options, complaint",
    [
        ({"enable_thinkng": False}, "has no variable enable_thinkng; leave that out"),
        ({"tools": TOOLS, "a": 1}, "has no variable a, tools"),
        ({"raise_exception": "x"}, "has no variable raise_exception"),
        ({"add_generation_prompt": False}, "cannot set add_generation_prompt to False"),
    ],
    ids=str,
)
def test_options_without_effect_are_refused(render, options, complaint):
    with pytest.raises(InvalidRequest, match=complaint):
        render("{{ enable_thinking }}{{ messages[0].content }}", **options)


@pytest.mark.parametrize("name", sorted(NOT_FOR_CLIENTS))
def test_clients_set_variables_of_the_template_and_nothing_else(make, name):
    with pytest.raises(InvalidRequest, match=f"chat_template_kwargs cannot set {name}; leave that out"):
        ChatTemplate(make("x")).render(HELLO, {name: "{{ 1 }}"}, 1000, 10.0)


@pytest.mark.parametrize(
    "source, seconds",
    [
        ("{% for _ in range(2000) %}x{% endfor %}", 10.0),
        ("{% block all %}{% for _ in range(2000) %}x{% endfor %}{% endblock %}", 10.0),
        ("{{ messages[0].content }}", -1.0),
    ],
)
def test_too_much_text_and_too_much_work_are_refused(render, source, seconds):
    with pytest.raises(InvalidRequest, match="makes this conversation too long"):
        render(source, seconds=seconds)


def test_rendering_stops_when_there_is_too_much(render):
    """The template would go on for years."""
    nested = "{% for _ in range(99999) %}" * 3 + "x" + "{% endfor %}" * 3
    with pytest.raises(InvalidRequest, match="more than 1000 characters, or 10 s"):
        render(nested)


def test_limits_are_those_of_one_call(make):
    tokenizer = make("{% for _ in range(9) %}x{% endfor %}{{ messages[0].content }}")
    template = ChatTemplate(tokenizer)
    with pytest.raises(InvalidRequest, match="more than 10 characters"):
        template.render(HELLO, {}, 10, 10.0)
    assert template.render(HELLO, {}, 50, 10.0) == "x" * 9 + "Hello <you>"
    assert tokenizer.apply_chat_template(HELLO, tokenize=False) == "x" * 9 + "Hello <you>"


def test_the_client_of_the_same_files_renders_the_same(tmp_path, tokenizer):
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    config = {"tokenizer_class": "Qwen2Tokenizer", "eos_token": "<|im_end|>", "model_max_length": 2048}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3", "eos_token_id": 1}))
    (tmp_path / "chat_template.jinja").write_text(chat_templates.QWEN3)
    theirs = AutoTokenizer.from_pretrained(tmp_path, local_files_only=True)
    ours = load_model_text(tmp_path)
    wanted = theirs.apply_chat_template(TALK, tokenize=False, add_generation_prompt=True, tools=TOOLS)
    assert ours.template.render(TALK, {"tools": TOOLS}, 10_000, 10.0) == wanted
