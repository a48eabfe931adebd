"""A turn that was sampled keeps its tokens, whatever its client makes of its words.

The samples are words of the vocabulary in splits that no tokenizer would choose.
"""

import json
import random
from dataclasses import replace

import msgspec
import pytest

from spmd_tx.bounds import Bounds
from spmd_tx.coordinator.conversation.chat_reader import read_conversation
from spmd_tx.coordinator.conversation.turn_tree import BranchCause
from spmd_tx.coordinator.text.conversation_prompts import PromptMaker
from spmd_tx.coordinator.text.model_text import LazyModelText, load_model_text
from spmd_tx.coordinator.text.prompt_texts import PromptTexts
from spmd_tx.coordinator.text.turn_memory import TurnMemory
from spmd_tx.demo import tiny_model
from spmd_tx.errors import InvalidRequest
from tests.support.reply_templates import FAMILIES

TOOL = {"type": "function", "function": {"name": "look", "parameters": {"properties": {"path": {}, "n": {}}}}}
WORDS = ["An", "swer", " ü", "\n\n", "  ", "x1", "}", "é", "0.50"]


def verbatim(message):
    return message


def without_reasoning(message):
    return {key: value for key, value in message.items() if key != "reasoning_content"}


def with_arguments(write):
    def rewritten(message):
        calls = [
            {**call, "function": {**call["function"], "arguments": write(call["function"]["arguments"])}}
            for call in message.get("tool_calls") or []
        ]
        return {**message, **({"tool_calls": calls} if calls else {})}

    return rewritten


def in_javascript(arguments):
    """Numbers without their fractions, and other blanks."""
    return json.dumps(json.loads(arguments, parse_float=lambda text: round(float(text), 6)), indent=1)


CLIENTS = {
    "codex": verbatim,
    "openai-agents": without_reasoning,
    "langchain": lambda message: with_arguments(lambda text: json.dumps(json.loads(text)))(
        without_reasoning(message)
    ),
    "pydantic-ai": with_arguments(lambda text: json.dumps(json.loads(text), separators=(",", ":"))),
    "opencode": with_arguments(in_javascript),
    "messages": with_arguments(json.loads),
    "parts": lambda message: message | {"content": [{"type": "text", "text": message["content"] or ""}]},
}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    directory = tmp_path_factory.mktemp("model")
    tiny_model.write(directory, replace(tiny_model.PRESETS["tiny"], max_positions=1 << 15), seed=0)
    (directory / "chat_template.jinja").write_text(FAMILIES["qwen2_5"])
    return directory


@pytest.fixture
async def maker(model):
    text = LazyModelText(lambda: load_model_text(model))
    texts = PromptTexts(model, text, 1 << 18, Bounds())
    yield PromptMaker("base", await text.get(), texts)
    await texts.close()


def split(random, tokenizer, text):
    """Tokens of a text in pieces of random lengths."""
    tokens = []
    while text:
        length = random.randint(1, 4)
        tokens += tokenizer.encode(text[:length]).ids
        text = text[length:]
    return tokens


def answer(random, tokenizer):
    text = "".join(random.choices(WORDS, k=random.randint(0, 6)))
    arguments = {"path": "a\u00fc"[: random.randint(1, 2)], "n": random.choice([1.0, 100.0, 2.5, 7, True])}
    spaced = json.dumps(arguments, indent=random.choice([None, 2]), ensure_ascii=random.random() < 0.5)
    call = f'\n<tool_call>\n{{"name": "look", "arguments": {spaced}}}\n</tool_call>'
    end = tokenizer.token_to_id("<|im_end|>")
    return [*split(random, tokenizer, text + call * random.randint(0, 2)), end]


def as_client_sees(message):
    calls = [
        {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
        for call in message.calls
    ]
    seen = {"role": "assistant", "content": message.text or None}
    if message.reasoning:
        seen["reasoning_content"] = message.reasoning
    return {**seen, **({"tool_calls": calls} if calls else {})}


async def play(maker, rewrite, seed, turns=6):
    """Yield the tokens so far and the next prompt, turn by turn."""
    draws, memory = random.Random(seed), TurnMemory(64 << 20)
    tokenizer, end = maker.model.tokenizer, None
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}]
    for number in range(turns):
        conversation = read_conversation(messages, [TOOL], has_parallel_calls=True)
        tree = memory.tree("owner", "base", conversation.messages)
        prompt = await maker.make(conversation, {}, tree, (), 0)
        if end is not None:
            yield end, prompt
        sampled = answer(draws, tokenizer)
        turn, _ = prompt.turn(maker.model, f"{seed:032x}{number}:0", sampled)
        memory.add(tree, turn)
        end = [*prompt.tokens, *sampled]
        seen = as_client_sees(turn.message)
        results = [
            {"role": "tool", "tool_call_id": call["id"], "content": f"seen {call['id'][-4:]}"}
            for call in seen.get("tool_calls") or []
        ]
        draws.shuffle(results)
        messages += [rewrite(seen), *(results or [{"role": "user", "content": f"And {number}?"}])]


async def breaks(maker, rewrite, seeds):
    count = 0
    for seed in seeds:
        async for end, prompt in play(maker, rewrite, seed):
            is_whole = prompt.tokens[: len(end)] == end and prompt.reused == len(end)
            count += not (is_whole and prompt.place.branch.cause is BranchCause.CONTINUES)
    return count


@pytest.mark.parametrize("client", CLIENTS)
async def test_every_prompt_begins_with_the_tokens_before_it(maker, client):
    assert await breaks(maker, CLIENTS[client], range(4)) == 0


@pytest.mark.slow
@pytest.mark.parametrize("client", CLIENTS)
async def test_thirty_trajectories_of_six_turns_have_no_breaks(maker, client):
    assert await breaks(maker, CLIENTS[client], range(100, 130)) == 0


async def test_an_edited_turn_is_the_clients(maker):
    def edited(message):
        return {**message, "content": f"{message['content'] or ''} edited"}

    async for end, prompt in play(maker, edited, 1, turns=3):
        assert prompt.tokens[: len(end)] != end
        assert prompt.reused == 0


async def test_a_conversation_of_many_characters_goes_on_from_its_tokens(maker):
    """It is rendered in another process."""
    memory, tokenizer = TurnMemory(64 << 20), maker.model.tokenizer
    messages = [{"role": "user", "content": "word " * 20_000}]
    conversation = read_conversation(messages, [TOOL], has_parallel_calls=True)
    tree = memory.tree("owner", "base", conversation.messages)
    prompt = await maker.make(conversation, {}, tree, (), 100_000)
    sampled = [*split(random.Random(0), tokenizer, "An answer"), tokenizer.token_to_id("<|im_end|>")]
    turn, _ = prompt.turn(maker.model, "r:0", sampled)
    memory.add(tree, turn)
    messages += [as_client_sees(turn.message), {"role": "user", "content": "And?"}]
    conversation = read_conversation(messages, [TOOL], has_parallel_calls=True)
    again = await maker.make(conversation, {}, tree, (), 100_000)
    assert again.tokens[: len(prompt.tokens) + len(sampled)] == [*prompt.tokens, *sampled]
    assert tokenizer.decode(again.tokens[again.reused :], skip_special_tokens=False) == (
        "\n<|im_start|>user\nAnd?<|im_end|>\n<|im_start|>assistant\n"
    )


async def test_other_owners_and_bases_share_no_turns(maker):
    memory = TurnMemory(64 << 20)
    conversation = read_conversation([{"role": "user", "content": "Hello"}], None, has_parallel_calls=True)
    tree = memory.tree("owner", "base", conversation.messages)
    prompt = await maker.make(conversation, {}, tree, (), 0)
    memory.add(tree, prompt.turn(maker.model, "r:0", [1, 2])[0])
    assert memory.tree("owner", "base", conversation.messages).turns
    assert not memory.tree("other", "base", conversation.messages).turns
    assert not memory.tree("owner", "other", conversation.messages).turns


async def test_the_memory_is_bounded(maker):
    memory = TurnMemory(64 << 10)
    for number in range(300):
        asked = [{"role": "user", "content": f"Hello {number} " + "x" * 200}]
        conversation = read_conversation(asked, None, has_parallel_calls=True)
        tree = memory.tree("owner", "base", conversation.messages)
        prompt = await maker.make(conversation, {}, tree, (), 0)
        memory.add(tree, prompt.turn(maker.model, f"r{number}:0", [1, 2])[0])
    assert memory.size <= 64 << 10
    assert memory.tree("owner", "base", conversation.messages).turns
    first = read_conversation(
        [{"role": "user", "content": "Hello 0 " + "x" * 200}], None, has_parallel_calls=True
    )
    assert not memory.tree("owner", "base", first.messages).turns


async def test_what_is_nested_too_deeply_is_refused(maker):
    nested = msgspec.json.decode(b"[" * 400 + b"]" * 400)
    for _ in range(5000):
        nested = [nested]
    conversation = read_conversation(
        [{"role": "user", "content": "Hello", "name": nested}], None, has_parallel_calls=True
    )
    with pytest.raises(InvalidRequest, match="nested too deeply"):
        await maker.make(conversation, {}, TurnMemory(1).tree("o", "b", []), (), 0)
