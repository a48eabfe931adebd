"""An agent on a real server. Its model is trained to call a tool, to read the result and to answer."""

import openai
import pytest
from tinker import types
from tokenizers import Tokenizer

from spmd_tx.coordinator.agent.layout import TOKENIZER
from tests.sdk.examples import SECONDS, supervised
from tests.sdk.server import BASE_MODEL

LOOK = {
    "type": "function",
    "function": {
        "name": "look",
        "parameters": {"type": "object", "properties": {"n": {"type": "integer"}}},
    },
}
ASK = {"role": "user", "content": "Look at 3."}
SCRIPT = [
    "<think>\nI look.\n</think>\n\n"
    '<tool_call>\n{"name": "look", "arguments": {"n": 3}}\n</tool_call><|im_end|>',
    "<think>\nIt is red.\n</think>\n\nRed.<|im_end|>",
]
STEPS = 150
LEARNED = 0.02  # nats per token


@pytest.fixture(scope="module")
def client(server):
    url = f"{server.url}/oai/api/v1"
    with openai.OpenAI(base_url=url, api_key="tml-test", timeout=SECONDS, max_retries=0) as client:
        yield client


def answer(client, model, messages, *, streamed):
    """The choice of an answer."""
    asked = {"model": model, "messages": messages, "tools": [LOOK], "temperature": 0}
    if not streamed:
        return client.chat.completions.create(**asked).choices[0]
    with client.chat.completions.stream(**asked) as stream:
        return stream.get_final_completion().choices[0]


def play(client, model, *, streamed):
    """Let the agent call its tool once, and answer."""
    calling = answer(client, model, [ASK], streamed=streamed)
    (call,) = calling.message.tool_calls
    result = {"role": "tool", "tool_call_id": call.id, "content": "red"}
    return calling, answer(client, model, [ASK, calling.message, result], streamed=streamed)


@pytest.fixture
def scripted(client, new_trainer, model_dir):
    """A model that follows the script."""
    tokenizer = Tokenizer.from_file(str(model_dir / TOKENIZER))
    call = {"id": "c", "type": "function", "function": {"name": "look", "arguments": '{"n": 3}'}}
    called = {"role": "assistant", "reasoning_content": "I look.", "tool_calls": [call]}
    talks = [[ASK], [ASK, called, {"role": "tool", "tool_call_id": "c", "content": "red"}]]
    data = []
    for talk, text in zip(talks, SCRIPT, strict=True):
        only_prompt = {"tools": [LOOK], "max_tokens": 1, "extra_body": {"return_token_ids": True}}
        prompt = client.chat.completions.create(
            model=BASE_MODEL, messages=talk, **only_prompt
        ).prompt_token_ids
        tokens = tokenizer.encode(text).ids
        data.append(supervised([*prompt, *tokens], [0.0] * (len(prompt) - 1) + [1.0] * len(tokens)))
    trainer = new_trainer(rank=16)
    trained = sum(len(tokenizer.encode(text).ids) for text in SCRIPT)
    loss = float("inf")
    for _ in range(STEPS):
        gradient = trainer.forward_backward(data, "cross_entropy")
        trainer.optim_step(types.AdamParams(learning_rate=1e-2)).result(SECONDS)
        loss = gradient.result(SECONDS).metrics["loss:sum"] / trained
        if loss < LEARNED:
            break
    assert loss < LEARNED
    return trainer.save_weights_for_sampler("scripted").result(SECONDS).path


def test_an_agent_calls_a_tool_reads_its_result_and_answers(client, scripted):
    for model, streamed in ((scripted, False), (f"{BASE_MODEL};{scripted}", True)):
        calling, last = play(client, model, streamed=streamed)
        (call,) = calling.message.tool_calls
        assert (calling.finish_reason, last.finish_reason) == ("tool_calls", "stop")
        assert (call.function.name, call.function.arguments) == ("look", '{"n":3}')
        assert (calling.message.content or None, calling.message.reasoning_content) == (None, "I look.")
        assert (last.message.content, last.message.reasoning_content) == ("Red.", "It is red.")
