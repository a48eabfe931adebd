"""Invents what the routes of trajectories answer: an agent with a helper, a retry and an edited message."""

import math

MODEL = "Qwen/Qwen3-4B"
WEIGHTS = "tinker://00000000-train-0/sampler_weights/step 240"
AT = "2026-09-21T10:{:02}:00Z"
CALL = {"name": "search", "arguments": '{"query": "capital of France"}', "id": "call-1"}
# Number of the parent, cause, message, agent, state and status of each turn
TURNS = [
    (None, "first", None, None, "sampled", "ok"),
    (0, "continues", None, None, "sampled", "ok"),
    (None, "new", None, "Explore", "sampled", "ok"),
    (2, "continues", None, "Explore", "sampled", "broken"),
    (0, "retry", None, None, "sampled", "ok"),
    (1, "continues", None, None, "sampled", "ok"),
    (1, "edited", 7, None, "cut", None),
    (None, "tools_changed", None, None, "failed", None),
]


def listed() -> dict:
    names = ["agent-17", "agent-16", "rollout-0003"]
    return {"trajectories": [_entry(number, name) for number, name in enumerate(names)], "cursor": None}


def _entry(number: int, name: str) -> dict:
    return {
        "id": f"trj_{number}",
        "name": name,
        "owner": "ada",
        "state": "finished" if number else "open",
        "created_at": AT.format(5 - number),
        "used_at": AT.format(20 - number),
        "model": MODEL,
        "weights": WEIGHTS,
        "turns": len(TURNS),
        "prompt_tokens": 48_100,
        "reused_tokens": 39_000,
        "cached_tokens": 36_912,
        "sampled_tokens": 2_871,
        "roots": 3,
        "branches": 5,
        "size_bytes": 91_000,
        "reward": None if number == 2 else 1.0 - number,
        "metrics": {"steps": 8},
        "user_metadata": None,
    }


def tree(query: dict[str, str]) -> dict:
    is_outline = query.get("outline") == "true"
    wanted = query.get("turns_of", "").split(",")
    turns = [_turn(number, is_outline=is_outline) for number in range(len(TURNS))]
    if "turns_of" in query:
        turns = [each for each in turns if each["id"].partition(":")[0] in wanted]
    return {"trajectory": _entry(0, "agent-17"), "turns": turns}


def _turn(number: int, *, is_outline: bool) -> dict:
    parent, cause, message, agent, state, status = TURNS[number]
    tokens = [] if state == "failed" else _tokens(2400 if number == 5 else 40)
    question = "Look it up. " * (400 if number == 0 else 1)
    asked = [{"role": "user", "text": question}]
    if cause == "continues":
        asked = [{"role": "tool", "text": "Paris is the capital of France.", "call_id": "call-1"}]
    said = {"role": "assistant", "text": "", "reasoning": "I look.", "calls": [CALL]}
    return {
        "id": f"request-{number}:0",
        "parent": None if parent is None else f"request-{parent}:0",
        "cause": cause,
        "cause_message": message,
        "state": state,
        "model": MODEL,
        "weights": WEIGHTS if number > 2 else None,
        "dialect": "messages",
        "agent": agent,
        "created_at": AT.format(10 + number),
        "finished_at": AT.format(11 + number),
        "new_messages": [] if is_outline else asked,
        "reused_tokens": 0 if parent is None else 5400,
        "new_tokens": 900,
        "cached_tokens": None if state == "failed" else 5000 if parent is not None else 0,
        "sampled_tokens": len(tokens),
        "message": None if is_outline or state == "failed" else said,
        "status": None if is_outline else status,
        "stop_reason": None if is_outline else "length" if number == 5 else "stop",
        "reward": 0.5 if number == 1 else None,
        "metrics": None,
        "tokens": [] if is_outline else tokens,
        "forced": [] if is_outline else [each.startswith("<tool") for each in tokens],
        "logprobs": []
        if is_outline
        else [-(abs(5 * math.sin(3 * each)) ** 3) / 20 for each in range(len(tokens))],
    }


def _tokens(count: int) -> list[str]:
    words = [
        "<tool_call>",
        "\n",
        '{"name":',
        ' "search"',
        ", ",
        '"arguments"',
        ":",
        ' {"query"',
        ":",
        ' "<b>"',
        "}}",
    ]
    return [words[each % len(words)] for each in range(count)]
