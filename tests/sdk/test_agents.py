"""An agent on a real server. Its model is trained to call a tool, to read the result and to answer."""

import json

import anthropic
import openai
import pytest
import tinker
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


@pytest.fixture(scope="module")
def messages_client(server):
    url = f"{server.url}/anthropic/api"
    with anthropic.Anthropic(base_url=url, api_key="tml-test", timeout=SECONDS, max_retries=0) as client:
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


@pytest.fixture(scope="module")
def scripted(client, server, model_dir):
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
    service = tinker.ServiceClient(base_url=server.url, api_key="tml-test")
    trainer = service.create_lora_training_client(BASE_MODEL, rank=16, seed=1).result(SECONDS)
    trained = sum(len(tokenizer.encode(text).ids) for text in SCRIPT)
    loss = float("inf")
    for _ in range(STEPS):
        gradient = trainer.forward_backward(data, "cross_entropy")
        trainer.optim_step(types.AdamParams(learning_rate=1e-2)).result(SECONDS)
        loss = gradient.result(SECONDS).metrics["loss:sum"] / trained
        if loss < LEARNED:
            break
    assert loss < LEARNED
    yield trainer.save_weights_for_sampler("scripted").result(SECONDS).path
    service.close("success").result(SECONDS)


def test_an_agent_calls_a_tool_reads_its_result_and_answers(client, scripted):
    for model, streamed in ((scripted, False), (f"{BASE_MODEL};{scripted}", True)):
        calling, last = play(client, model, streamed=streamed)
        (call,) = calling.message.tool_calls
        assert (calling.finish_reason, last.finish_reason) == ("tool_calls", "stop")
        assert (call.function.name, call.function.arguments) == ("look", '{"n":3}')
        assert (calling.message.content or None, calling.message.reasoning_content) == (None, "I look.")
        assert (last.message.content, last.message.reasoning_content) == ("Red.", "It is red.")


def message(client, model, messages, *, streamed):
    """The assistant's next message, by Anthropic's API."""
    function = LOOK["function"]
    tool = {"name": function["name"], "input_schema": function["parameters"]}
    asked = {"model": model, "messages": messages, "tools": [tool], "max_tokens": 32_000}
    asked["extra_body"] = {"temperature": 0}
    if not streamed:
        return client.messages.create(**asked)
    with client.messages.stream(**asked) as stream:
        return stream.get_final_message()


@pytest.mark.parametrize("streamed", [False, True])
def test_an_agent_finishes_by_anthropics_messages(messages_client, scripted, streamed):
    calling = message(messages_client, scripted, [ASK], streamed=streamed)
    thinking, use = calling.content
    assert (thinking.thinking, use.name, use.input, calling.stop_reason) == (
        "I look.",
        "look",
        {"n": 3},
        "tool_use",
    )
    result = {"type": "tool_result", "tool_use_id": use.id, "content": "red"}
    called = {"role": "assistant", "content": calling.content}
    talk = [ASK, called, {"role": "user", "content": [result]}]
    last = message(messages_client, scripted, talk, streamed=streamed)
    assert (last.content[0].thinking, last.content[1].text, last.stop_reason) == (
        "It is red.",
        "Red.",
        "end_turn",
    )


def response(client, model, items, *, streamed):
    """The answer by OpenAI's Responses."""
    asked = {"model": model, "input": items, "tools": [{"type": "function", **LOOK["function"]}]}
    asked |= {"temperature": 0, "store": False, "include": ["reasoning.encrypted_content"]}
    if not streamed:
        return client.responses.create(**asked)
    with client.responses.stream(**asked) as stream:
        return stream.get_final_response()


@pytest.mark.parametrize("streamed", [False, True])
def test_an_agent_finishes_by_responses(client, scripted, streamed):
    calling = response(client, scripted, [ASK], streamed=streamed)
    reasoning, call = calling.output
    assert (reasoning.summary[0].text, call.name, json.loads(call.arguments)) == ("I look.", "look", {"n": 3})
    output = {"type": "function_call_output", "call_id": call.call_id, "output": "red"}
    last = response(client, scripted, [ASK, *calling.output, output], streamed=streamed)
    assert (last.output_text, last.status, last.output[0].summary[0].text) == (
        "Red.",
        "completed",
        "It is red.",
    )
