"""Invents what the routes of the console answer: runs, samples, a server and its people."""

import json
import math

import msgspec

from spmd_tx.coordinator.requests.runs.curve_columns import CurveWindow, RunColumns, chosen
from spmd_tx.coordinator.wire.console.runs import CurvesResponse, MetricsPoint
from tests.support.pictures import png

STEPS = 400
START = 1_790_000_000.0  # seconds since the epoch
FAILURE = {
    "request_id": "5f0c7c2a9e0d4b0f8b6c",
    "kind": "forward_backward",
    "category": "user",
    "error": "datum 3 has 70,000 tokens; the model's context has 40,960",
    "at": START + 1500,
}
HEALTH = [
    {
        "state": "waiting",
        "reason": "taking turns with 1 other model, which has 2 micro-batches ready",
        "failed": 3,
        "last_failure": FAILURE,
    },
    {"state": "errored", "reason": "KeyError: 'reward'", "failed": 0},
    {"state": "finished", "reason": None, "failed": 0},
    {"state": "interrupted", "reason": "its client was silent for 1800 seconds", "failed": 0},
    {"state": "finished", "reason": None, "failed": 0},
]
WORDS = "The sum of the two numbers is found by adding their digits from the right .".split()


def runs() -> list[dict]:
    names = [
        "arithmetic rl",
        "arithmetic, half rate",
        "sft on capitals",
        "distillation",
        "<b>odd & name</b>",
    ]
    return [
        {
            "id": f"{number:08x}-train-0",
            "session_id": f"session-{number}",
            "base_model": "Qwen/Qwen3-4B" if number < 3 else "openai/gpt-oss-20b",
            "rank": 32,
            "owner": "ada",
            "created_at": START - 3600 * number,
            "is_open": number == 0,
            "health": HEALTH[number],
            "metadata": ({} if number == 2 else {"name": name}) | {"optimizer": {"learning_rate": 1e-4}},
            "display_name": name if number == 2 else None,
            "tags": [],
            "steps": STEPS if number < 4 else 0,
            "last_at": START - 3600 * number + 4 * STEPS if number < 4 else None,
            "last": point(number, STEPS)["metrics"] if number < 4 else {},
            "name": None,
            "group": "sweep of rates" if number < 2 else None,
            "archived_at": None,
            "alarms": ["the gradient's norm, 52, is 68 times as large as usual"] if number == 1 else [],
        }
        for number, name in enumerate(names)
    ]


def point(run: int, step: int) -> dict:
    noise = math.sin(step * 12.9898 + run * 78.233) * 43758.5453 % 1 - 0.5
    progress = 1 - math.exp(-step / (90 + 60 * run))
    return {
        "seq": 7 * step,
        "step": step,
        "at": START - 3600 * run + 4.0 * step,
        "metrics": {
            "loss:sum": 4096 * (2.4 - 1.5 * progress + 0.2 * noise),
            "num_tokens:sum": 4096,
            "reward": None if step == 100 else 0.9 * progress + 0.15 * noise,
            "entropy:mean": 1.2 - 0.8 * progress + 0.05 * noise,
            "unclipped_grad_l2:mean": 0.4 + 0.3 * abs(noise),
            "learning_rate:mean": 1e-4 * (1 - step / 500),
            '=HYPERLINK("http://other.site")': 1.0,
        },
    }


def curves(run: int, steps: int, query: dict[str, str]) -> dict:
    columns = RunColumns()
    columns.add(msgspec.convert([point(run, step) for step in range(1, steps + 1)], list[MetricsPoint]))
    first, last = float(query.get("first", "-inf")), float(query.get("last", "inf"))
    window = CurveWindow("time" if query.get("axis") == "time" else "step", first, last)
    drawn = [columns.curve(name, window) for name in chosen(columns, [], 12)]
    return msgspec.to_builtins(CurvesResponse(columns.names, [each for each in drawn if each is not None]))


def timing(window: float) -> dict:
    """A run that mostly waits for its client, and whose programs were compiled in the beginning."""
    until = START + 1600.0
    since = until - window
    shares = {"client": 0.46, "device": 0.31, "queue": 0.12, "compile": 0.08, "server": 0.03}
    slices = []
    for number in range(int(window // 5)):
        early = max(0.0, 1 - number / 12)
        seconds = {"compile": 4 * early, "device": 1.6 * (1 - early), "queue": 0.7 * (1 - early)}
        seconds |= {"server": 0.15, "restart": 0.0}
        slices.append({"at": since + 5 * number, "seconds": {**seconds, "client": 5 - sum(seconds.values())}})
    return {
        "since": since,
        "until": until,
        "summary": "The run spent the largest part of this time waiting for its client (46 %).",
        "group": {"name": "main", "is_only": False, "state": "ready", "phase": "running"},
        "shares": [
            {"cause": cause, "seconds": part * window, "advice": f"What helps against {cause}."}
            for cause, part in shares.items()
        ],
        "slices": slices,
        "requests": [each for number in range(40) for each in _requests(number, until - 300 + 7 * number)],
        "is_cut": False,
    }


def _requests(number: int, at: float) -> list[dict]:
    compiling = [["compiling", at + 0.3, at + 2.5]] if number < 8 else []
    sent = at + (2.5 if compiling else 0.9)
    stages = [["queued", at, at + 0.1], ["batched", at + 0.1, at + 0.3 if compiling else sent], *compiling]
    trained = [*stages, ["device", sent, sent + 1.5], ["encoded", sent + 1.5, sent + 1.6]]
    is_last = number == 39
    sampled = [["batched", sent + 2, sent + 2.2], ["device", sent + 2.2, sent + 4.2]]
    return [
        _request(3 * number, "forward_backward", number, trained),
        _request(3 * number + 1, "sample", number, sampled[:1] if is_last else sampled, is_open=is_last),
        _request(3 * number + 2, "sample", number + 1000, sampled),
    ]


def _request(number: int, kind: str, seq_id: int, stages: list, *, is_open: bool = False) -> dict:
    return {
        "number": number,
        "kind": kind,
        "line": "model",
        "seq_id": seq_id,
        "stages": stages,
        "state": "unfinished" if is_open else "finished",
        "tokens": None if is_open else 4096,
        "reason": "taking turns with 1 other model, which has 3 micro-batches ready" if is_open else None,
    }


def samples(query: dict[str, str]) -> dict:
    """Eight requests with four samples each, of which every second one is found."""
    found = [_sampled(number) for number in range(8)]
    if "search" in query or "prompt_of" in query:
        found = found[::2]
    if query.get("order") == "highest":
        found = [{**each, "samples": each["samples"][::-1]} for each in found[:7]]
    return {"requests": found, "looked_at": 8, "next_start": None, "kept_hours": 2.0}


def _sampled(number: int) -> dict:
    answers = [_answer(number, place) for place in range(4)]
    return {
        "id": f"{number:032x}",
        "number": 100 - number,
        "group": f"group {number}",
        "at": START + 1500 - 20 * number,
        "weights": f"version {24 - number}",
        "steps": 240 - 10 * number,
        "prompt": {"text": f"What is {17 + number} + {25 + 3 * number}?", "tokens": 9, "is_cut": False},
        "temperature": 1.0,
        "samples": [
            {
                "excerpt": {"text": "".join(texts), "tokens": len(texts), "is_cut": False},
                "stop_reason": "stop" if place else "length",
                "mean_logprob": sum(logprobs) / len(logprobs),
                "advantage": None if number == 7 else (place - 1.5) / 2,
            }
            for place, (texts, logprobs) in enumerate(answers)
        ],
        "num_samples": 6,
        "error": None,
    }


def _answer(number: int, place: int) -> tuple[list[str], list[float]]:
    texts = [f" {word}" for word in WORDS[place:]] + ["\n", str(42 + 4 * number + place // 2), "<|im_end|>"]
    noise = (abs(math.sin(12.9898 * n + 78.233 * place)) for n in range(len(texts)))
    return texts, [-5.5 * each**4 - 0.001 for each in noise]


PICTURE = png(64, 96)


def sample_group(request_id: str) -> dict:
    """Four samples of a prompt; that of the first request has an image."""
    prompt = ["<|im_start|>", "user", "\n", "What", " is", " 17", " +", " 25", "?", "<|im_end|>", "\n"]
    found = []
    for place in range(4):
        texts, logprobs = _answer(0, place)
        content = {"tokens": [*range(len(texts))], "texts": texts, "logprobs": logprobs}
        content |= {"left_out": 120 if place == 3 else 0, "left_out_at": 5 if place == 3 else len(texts)}
        reason, mean = "stop" if place else "length", sum(logprobs) / len(logprobs)
        one = {"request_id": f"{0:032x}", "place": place, "at": START, "stop_reason": reason}
        found.append(one | {"mean_logprob": mean, "advantage": (place - 1.5) / 2, "content": content})
    content = {"tokens": [*range(len(prompt))], "texts": prompt, "logprobs": None}
    image = {"number": 0, "tokens": 6, "width": 96, "height": 64, "size": len(PICTURE)}
    return {
        "model": "session-0:sample:24",
        "weights": "version 24",
        "steps": 240,
        "prompt": content | {"left_out": 0, "left_out_at": len(prompt)},
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": 20,
        "max_tokens": 256,
        "samples": found,
        "left_out": 2,
        "not_read": 0,
        "errors": [],
        "images": [image] if request_id == f"{0:032x}" else [],
    }


def scored(asked: dict) -> dict:
    """The likeliest tokens in each place of a prompt, as an echo has them."""
    texts, logprobs = _answer(0, 0)
    others = {" a": -0.4, " one": -1.9, " 4": -2.6, "\n": -3.5, " of": -4.25}
    answer = [others | {text: logprob} for text, logprob in zip(texts, logprobs, strict=True)]
    before = len(asked["prompt"]) - len(answer)
    return {"choices": [{"logprobs": {"top_logprobs": [None, *[others] * (before - 1), *answer]}}]}


def completion(asked: dict) -> list[bytes]:
    """The events of a stream, with two choices at most, and a character of two tokens."""
    is_chat = "messages" in asked
    texts, logprobs = _answer(0, 2)
    pieces = [*texts[:-1], " ", "😀", texts[-1]]
    tokens = [*texts[:-1], " \ufffd", "\ufffd", texts[-1]]
    logprobs = [*logprobs[:-1], -0.7, -0.02, logprobs[-1]]
    events = []
    for place, (text, token, logprob) in enumerate(zip(pieces, tokens, logprobs, strict=True)):
        is_last = place == len(tokens) - 1
        text = "" if is_last else text
        for index in range(asked["n"]):
            if is_chat:
                content = {"delta": {"content": text}}
                known = {"content": [{"token": token, "logprob": logprob}]}
            else:
                content = {"text": text}
                known = {"tokens": [token], "token_logprobs": [logprob]}
            reason = "stop" if is_last else None
            events.append(
                {"choices": [content | {"index": index, "finish_reason": reason, "logprobs": known}]}
            )
    lines = [f"data: {json.dumps(each)}\n\n".encode() for each in events]
    return [b": still working\n\n", *lines, b"data: [DONE]\n\n"]


def keys() -> dict:
    """The keys of three owners, of which one was revoked and one is the caller's."""
    common = {"created_at": START - 86400, "expires_at": None, "last_used_at": START, "limits": {}}
    common |= {"problem": None, "is_own": False, "role": "user"}
    limits = {"adapters": 4, "requests_per_second": 20}
    found = [
        {"id": "5b1c90aa", "owner": "ada", "role": "admin", "is_own": True},
        {"id": "77fe02d1", "owner": "grace", "limits": limits, "expires_at": START + 30 * 86400},
        {"id": "c4d1e6f0", "owner": "edsger", "role": "read-only", "last_used_at": None},
        {"id": "0d2a8b3c", "owner": "grace", "problem": "was revoked"},
    ]
    return {"keys": [common | each for each in found], "left_out": 0}


def use(hours: int) -> dict:
    last = int(START) // 3600 * 3600
    since = last - (hours - 1) * 3600
    found = []
    for number in range(hours):
        for owner, share in (("ada", 1.0), ("grace", 0.6)):
            trained = int(share * 3e6 * (1.2 + math.sin(number / 4)))
            sampled, prompt = trained // 3, trained // 5
            amounts = {"trained": trained, "forwarded": 0, "prompt": prompt, "cached": prompt // 2}
            found.append({"hour": since + 3600 * number, "owner": owner, **amounts, "sampled": sampled})
    return {"since": since, "until": last + 3599, "hours": found, "is_cut": False}


def audit() -> dict:
    events = [
        ("session_created", "ada", {"session_id": "8e2e4a4c"}),
        ("checkpoint_saved", "grace", {"tinker_path": "tinker://8e2e4a4c:train:0/weights/step 100"}),
        ("key_revoked", "ada", {"key": "0d2a8b3c"}),
    ]
    return {
        "entries": [
            {
                "timestamp": f"2026-09-21T10:{10 * number:02}:00Z",
                "event": event,
                "event_details": {"actor": actor, "api_key_id": "5b1c90aa", "owner": actor, **details},
            }
            for number, (event, actor, details) in enumerate(events)
        ]
    }


def saved_checkpoints() -> dict:
    """One to go on from that expires, two to sample from, and one of an earlier version."""
    run = runs()[0]["id"]
    common = {
        "base_model": "Qwen/Qwen3-4B",
        "user_metadata": {"task": "sums"},
        "public": False,
        "best": False,
    }
    saved = [
        ("weights/step 400", 400, 0.83, 0.021, 396_000_000),
        ("sampler_weights/final", 400, 0.83, 0.021, 132_000_000),
        ("sampler_weights/peak", 320, 0.91, 0.034, 132_000_000),
        ("weights/early", None, None, None, 396_000_000),
    ]
    found = [
        {
            "checkpoint": common
            | {
                "checkpoint_id": id,
                "checkpoint_type": "training" if id.startswith("weights") else "sampler",
                "size_bytes": size,
                "time": f"2026-09-21T1{9 - number}:00:00Z",
                "tinker_path": f"tinker://{run}/{id}",
            },
            "step": step,
            "metric": None if step is None else "env/reward/total",
            "value": value,
            "loss": loss,
        }
        for number, (id, step, value, loss, size) in enumerate(saved)
    ]
    found[0]["checkpoint"]["expires_at"] = "2126-09-28T10:00:00Z"
    found[1]["checkpoint"]["public"] = True
    cursor = {"offset": 0, "limit": 100, "total_count": len(found)}
    return {"checkpoints": found, "metrics": ["env/reward/total", "entropy:mean"], "cursor": cursor}
