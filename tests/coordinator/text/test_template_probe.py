import pytest
from transformers import PreTrainedTokenizerFast

from spmd_tx.coordinator.text.chat_template import ChatTemplate
from spmd_tx.coordinator.text.template_probe import CallIds, probe
from tests.support import chat_templates as released
from tests.support.reply_templates import FAMILIES


@pytest.fixture
def traits(tokenizer):
    """What is found out about a template."""

    def traits(source):
        made = PreTrainedTokenizerFast(tokenizer_object=tokenizer, chat_template=source)
        return probe(ChatTemplate(made))

    return traits


CALLS = "shows_tools takes_calls takes_parallel_calls"
SYSTEMS = "takes_later_systems takes_leading_systems"
BESIDE = "takes_content_beside_calls"
ALL = f"{CALLS} {SYSTEMS} takes_successive_users {BESIDE} takes_reasoning_beside_both"


@pytest.mark.parametrize(
    "family, lacks, ids, key",
    [
        ("qwen2_5", "takes_reasoning_beside_both", "any", None),
        ("qwen3", "", "any", "reasoning_content"),
        ("llama_3", f"takes_parallel_calls {BESIDE} takes_reasoning_beside_both", "any", None),
        ("mistral_v3", f"{SYSTEMS} {BESIDE} takes_reasoning_beside_both", "nine_letters", None),
        ("mistral_v11", SYSTEMS, "any", "reasoning_content"),
        ("glm_4_5", "", "any", "reasoning_content"),
        ("deepseek_v3_1", "takes_later_systems takes_reasoning_beside_both", "any", None),
        ("kimi_k2", "", "numbered", "reasoning_content"),
        ("gpt_oss", f"takes_parallel_calls {BESIDE} takes_reasoning_beside_both", "any", "reasoning_content"),
    ],
)
def test_what_the_template_of_a_family_takes(traits, family, lacks, ids, key):
    found = traits(FAMILIES[family])
    assert {name for name in ALL.split() if not getattr(found, name)} == set(lacks.split())
    assert (str(found.call_ids), found.reasoning_key) == (ids, key)
    assert found.wants_text_arguments == (family == "deepseek_v3_1")


def test_a_template_without_tools_shows_none(traits):
    found = traits(released.PLAIN)
    assert (found.shows_tools, found.takes_calls, found.takes_parallel_calls) == (False, False, False)
    assert (found.call_ids, found.reasoning_key, found.thinking_switch) == (CallIds.ANY, None, None)


@pytest.mark.parametrize(
    "source", [None, "", "{% if %}", "{{ raise_exception('no') }}", "{{ messages[9].x.y }}"]
)
def test_a_template_that_renders_nothing_takes_nothing(traits, source):
    found = traits(source)
    assert not any(getattr(found, name) for name in ALL.split())


def test_text_arguments_go_to_a_template_that_would_show_python(traits):
    """Braces of Python are no JSON."""
    found = traits(released.AS_THEY_COME)
    assert (found.takes_calls, found.wants_text_arguments) == (True, True)


def test_variables_are_those_that_the_template_reads(traits):
    found = traits(released.QWEN3)
    assert {"tools", "enable_thinking"} <= found.variables
    assert found.thinking_switch == "enable_thinking"


def test_a_template_without_end_is_given_up(traits):
    nested = "{% for _ in range(99999) %}" * 3 + "x" + "{% endfor %}" * 3
    assert not traits(nested).shows_tools
