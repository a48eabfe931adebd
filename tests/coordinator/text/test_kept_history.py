"""With ``history: keep`` turns stay as they were sampled, though the template would drop their reasoning."""

from dataclasses import replace

import pytest

from spmd_tx.bounds import Bounds
from spmd_tx.coordinator.conversation.chat_reader import read_conversation
from spmd_tx.coordinator.conversation.turn_tree import BranchCause
from spmd_tx.coordinator.text.conversation_prompts import PromptMaker
from spmd_tx.coordinator.text.model_text import LazyModelText, load_model_text
from spmd_tx.coordinator.text.prompt_texts import PromptTexts
from spmd_tx.coordinator.text.turn_memory import TurnMemory
from spmd_tx.demo import tiny_model
from tests.support import chat_templates

SWITCHED = """
{%- set ns = namespace(last=0) -%}
{%- for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor -%}
{%- for m in messages -%}
  {{- '<|im_start|>' + m.role + '\\n' -}}
  {%- if m.reasoning_content and (loop.index0 > ns.last or SWITCH) -%}
    {{- '<think>\\n' + m.reasoning_content + '\\n</think>\\n\\n' -}}
  {%- endif -%}
  {{- m.content + '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif -%}
"""
TEMPLATES = {
    "no switch": chat_templates.QWEN3,
    "preserve_thinking": SWITCHED.replace("SWITCH", "preserve_thinking"),
    "clear_thinking": SWITCHED.replace("SWITCH", "clear_thinking is false"),
    "begun in the prompt": SWITCHED.replace("SWITCH", "false").replace(
        "<|im_start|>assistant\\n", "<|im_start|>assistant\\n<think>\\n"
    ),
}
OPENER = "<think>\n"
SAMPLED = "I look.\n</think>\n\nAn answer<|im_end|>"
TURNS = 4


@pytest.fixture(params=TEMPLATES)
async def maker(request, tmp_path):
    tiny_model.write(tmp_path, replace(tiny_model.PRESETS["tiny"], max_positions=1 << 12))
    (tmp_path / "chat_template.jinja").write_text(TEMPLATES[request.param])
    text = LazyModelText(lambda: load_model_text(tmp_path))
    texts = PromptTexts(tmp_path, text, 1 << 12, Bounds())
    yield PromptMaker("base", await text.get(), texts, keeps_history=True)
    await texts.close()


async def play(maker, *, drops_reasoning):
    """Yield the tokens so far and the next prompt, turn by turn; the user speaks in each."""
    memory, tokenizer, end = TurnMemory(1 << 20), maker.model.tokenizer, None
    messages = [{"role": "user", "content": "Hello"}]
    for number in range(TURNS):
        conversation = read_conversation(messages, None, has_parallel_calls=True)
        tree = memory.tree("owner", "base", conversation.messages)
        prompt = await maker.make(conversation, {}, tree, (), 0)
        if end is not None:
            yield end, prompt
        text = SAMPLED if prompt.reading.begun.endswith(OPENER) else OPENER + SAMPLED
        sampled = [*tokenizer.encode(text[:9]).ids, *tokenizer.encode(text[9:]).ids]
        turn, _ = prompt.turn(maker.model, f"{number:032x}:0", sampled)
        memory.add(tree, turn)
        end = [*prompt.tokens, *sampled]
        seen = {"role": "assistant", "content": turn.message.text}
        if not drops_reasoning:
            seen["reasoning_content"] = turn.message.reasoning
        messages += [seen, {"role": "user", "content": f"And {number}?"}]


@pytest.mark.parametrize("drops_reasoning", [False, True])
async def test_a_conversation_is_one_segment(maker, drops_reasoning):
    tokenizer, prompts = maker.model.tokenizer, 0
    async for end, prompt in play(maker, drops_reasoning=drops_reasoning):
        assert prompt.tokens[: len(end)] == end
        assert prompt.place.branch.cause is BranchCause.CONTINUES
        new = tokenizer.decode(prompt.tokens[len(end) :], skip_special_tokens=False)
        said = f"\n<|im_start|>user\nAnd {prompts}?<|im_end|>\n<|im_start|>assistant\n"
        assert new.removesuffix(OPENER) == said
        prompts += 1
    assert prompts == TURNS - 1


async def test_else_the_template_decides(maker):
    """A user's turn makes it drop the reasoning of the turn before."""
    plain = replace(maker, keeps_history=False)
    async for end, prompt in play(plain, drops_reasoning=False):
        assert prompt.tokens[: len(end)] != end
        assert prompt.place.branch.cause is BranchCause.REWRITTEN
