import json

import pytest

from spmd_tx.coordinator.text.chat_template import ChatTemplate, read_chat_template
from spmd_tx.demo import tiny_model
from spmd_tx.errors import InvalidRequest

HELLO = [{"role": "user", "content": "Hello <you>"}]


def render(source, **options):
    return ChatTemplate(source, {"bos_token": "<s>"}).render(HELLO, options, 1000, 10.0)


def test_a_conversation_ends_where_the_assistant_begins():
    wanted = "<|im_start|>user\nHello <you><|im_end|>\n<|im_start|>assistant\n"
    assert render(tiny_model.CHAT_TEMPLATE) == wanted


@pytest.mark.parametrize(
    "source, text",
    [
        ("{{ bos_token }}{{ messages[0].content }}", "<s>Hello <you>"),
        ("{{ messages | tojson }}", '[{"role": "user", "content": "Hello <you>"}]'),
        ("{% for m in messages %}{% break %}{% endfor %}x", "x"),
        ("{% generation %}{{ messages[0].role }}{% endgeneration %}", "user"),
        ("{{ strftime_now('%Y') | length }}", "4"),
        ("{% if enable_thinking is defined %}{{ enable_thinking }}{% endif %}", "False"),
        ("{{ add_generation_prompt }}", "True"),
    ],
)
def test_templates_find_what_transformers_gives_them(source, text):
    assert render(source, enable_thinking=False, add_generation_prompt=False) == text


@pytest.mark.parametrize(
    "source, complaint",
    [
        (None, "no chat template"),
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[0].content + 1 }}", "cannot render"),
        ("{% if %}", "cannot render"),
        ("{{ messages.append(1) }}", "cannot render"),
        ("{{ ''.__class__.__mro__ }}", "cannot render"),
    ],
)
def test_what_cannot_be_rendered_is_refused(source, complaint):
    with pytest.raises(InvalidRequest, match=complaint):
        render(source)


@pytest.mark.parametrize(
    "config, text",
    [
        ({"chat_template": "one{{ eos_token }}", "eos_token": {"content": "</s>"}}, "one</s>"),
        (
            {"chat_template": [{"name": "rag", "template": "no"}, {"name": "default", "template": "yes"}]},
            "yes",
        ),
    ],
)
def test_the_template_is_found_where_models_have_it(tmp_path, config, text):
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    assert read_chat_template(tmp_path).render(HELLO, {}, 1000, 10.0) == text
    (tmp_path / "chat_template.jinja").write_text("a file goes first")
    assert read_chat_template(tmp_path).render(HELLO, {}, 1000, 10.0) == "a file goes first"


def test_a_model_without_any_says_so_when_it_is_asked(tmp_path):
    with pytest.raises(InvalidRequest, match=r"chat_template\.jinja"):
        read_chat_template(tmp_path).render(HELLO, {}, 1000, 10.0)


@pytest.mark.parametrize(
    "source, seconds",
    [("{% for _ in range(2000) %}x{% endfor %}", 10.0), ("{{ messages[0].content }}", -1.0)],
)
def test_too_much_text_and_too_much_work_are_refused(source, seconds):
    with pytest.raises(InvalidRequest, match="makes too much of this conversation"):
        ChatTemplate(source, {}).render(HELLO, {}, 1000, seconds)
