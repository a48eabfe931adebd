"""Odd requests of the dialects of OpenAI and Anthropic: completions, chats, and the turns of agents."""

from typing import Any

from tests.fuzz import odd_grammars
from tests.fuzz.calls import ANTHROPIC, BASE_MODEL, OPENAI, Call, Names, pick
from tests.fuzz.oddities import Oddities, as_json

Body = dict[str, Any]
SCHEMA = {"type": "object"}


def complete(odd: Oddities, names: Names) -> Call:
    """Few tokens, as the answer is waited for."""
    body = _sampling(odd, names) | {"max_tokens": 2, "n": 1}
    extras: Body = {"top_p": 0.9, "top_k": 5, "stop": ["a"], "return_token_ids": True, "echo": True}
    body |= {key: value for key, value in extras.items() if odd.chance(0.2)}
    if odd.chance(0.3):
        body |= odd_grammars.pattern(odd)
    prompts = ["a b", [1, 2, 3], ["a", "b"], [[1, 2], [3]]]
    return sent(odd, OPENAI + "completions", {**body, "prompt": odd.random.choice(prompts), "logprobs": 1})


def chat(odd: Oddities, names: Names, where: str = OPENAI) -> Call:
    """A turn of OpenAI's chats, which goes on from an earlier one where there is one."""
    body = _sampling(odd, names) | {"max_tokens": 4, "n": 1}
    call = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": '{"a": "b"}'}}
    invented = {"role": "assistant", "content": None, "tool_calls": [call]}
    before = pick(odd.random, names.turns.get("chat", []), invented)
    messages: list[Body] = [
        {"role": "system", "content": "a"},
        {"role": "user", "content": [{"type": "text", "text": "b"}]},
    ]
    if odd.chance(0.5):
        calls = before.get("tool_calls") or []
        results = [{"role": "tool", "tool_call_id": each.get("id"), "content": "c"} for each in calls]
        messages += [before, *(results or [{"role": "user", "content": "d"}])]
    body["messages"] = messages
    if odd.chance(0.5):
        strict = {"strict": True} if odd.chance(0.2) else {}
        body["tools"] = [
            {"type": "function", "function": {"name": "f", "parameters": _parameters(odd), **strict}}
        ]
        named = {"type": "function", "function": {"name": "f"}}
        body["tool_choice"] = odd.random.choice(["auto", "auto", "none", "required", named])
    elif odd.chance(0.4):
        body |= odd_grammars.of_chat(odd)
    if odd.chance(0.2):
        body |= {"logprobs": True, "top_logprobs": 2, "chat_template_kwargs": {"enable_thinking": False}}
    return sent(odd, where + "chat/completions", body)


def respond(odd: Oddities, names: Names, where: str = OPENAI) -> Call:
    """An agent's turn by OpenAI's Responses."""
    body = _sampling(odd, names) | {"max_output_tokens": 4, "store": False}
    forged = odd.random.choice(["c3R1Yg==", "A" * 64, odd.text()])
    invented = [
        {"type": "reasoning", "summary": [], "encrypted_content": forged},
        {"type": "function_call", "call_id": "call_1", "name": "f", "arguments": "{}"},
    ]
    before = pick(odd.random, names.turns.get("responses", []), invented)
    calls = [each.get("call_id") for each in before if each.get("type") == "function_call"]
    outputs = [{"type": "function_call_output", "call_id": call, "output": "b"} for call in calls]
    asked = {"role": "user", "content": [{"type": "input_text", "text": "a"}]}
    body["input"] = odd.random.choice(["a", [asked, *before, *(outputs or [asked])]])
    if odd.chance(0.6):
        function = {"type": "function", "name": "f", "parameters": _parameters(odd)}
        namespace = {"type": "namespace", "name": "n", "tools": [function]}
        body["tools"] = odd.random.choice([[function], [function], [namespace]])
        body["tool_choice"] = odd.random.choice(["auto", "required", {"type": "function", "name": "f"}])
    elif odd.chance(0.4):
        body |= odd_grammars.of_response(odd)
    return sent(odd, where + "responses", body)


def message(odd: Oddities, names: Names, where: str = ANTHROPIC) -> Call:
    """An agent's turn by Anthropic's Messages, or a count of its tokens."""
    body = _sampling(odd, names) | {"max_tokens": 4}
    forged = odd.random.choice(["c3R1Yg==", "A" * 64, odd.text()])
    thinking = {"type": "thinking", "thinking": "a", "signature": forged}
    use = {"type": "tool_use", "id": "toolu_1", "name": "f", "input": {"a": "b"}}
    before = pick(odd.random, names.turns.get("messages", []), [thinking, use])
    uses = [each.get("id") for each in before if each.get("type") == "tool_use"]
    text = [{"type": "text", "text": "b"}]
    results = [{"type": "tool_result", "tool_use_id": each, "content": text} for each in uses]
    messages: list[Body] = [{"role": "user", "content": "a"}]
    if odd.chance(0.7):
        messages += [{"role": "assistant", "content": before}, {"role": "user", "content": results or text}]
    body |= {"system": [{"type": "text", "text": "a"}], "messages": messages}
    if odd.chance(0.6):
        body["tools"] = [{"name": "f", "input_schema": _parameters(odd)}]
        body["tool_choice"] = odd.random.choice([{"type": "auto"}, {"type": "any"}, {"type": "none"}])
    elif odd.chance(0.4):
        body |= odd_grammars.of_message(odd)
    if odd.chance(0.2):
        counted = {key: body[key] for key in ("model", "messages", "tools", "system") if key in body}
        return sent(odd, where + "messages/count_tokens", counted)
    return sent(odd, where + "messages", body)


def sent(odd: Oddities, path: str, body: Body) -> Call:
    content = as_json(odd.spoilt(body) if odd.chance(0.4) else body, odd.random)
    return Call("POST", path, content, is_poll=True)


def _sampling(odd: Oddities, names: Names) -> Body:
    """Of a turn; half of the turns end with JSON, which says what a next one can go on from."""
    body: Body = {"model": BASE_MODEL, "temperature": 1.0, "seed": odd.random.randrange(9)}
    body["stream"] = odd.chance(0.5)
    if odd.chance(0.15):
        body["model"] = names.checkpoint("sampler_weights")
    return body


def _parameters(odd: Oddities) -> Any:
    return odd_grammars.schema(odd) if odd.chance(0.2) else SCHEMA
