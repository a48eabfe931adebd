"""How long a tenant waits while another one sends hostile grammars, conversations or images.

python -m tests.fuzz.beside_forms [SECONDS of each part] [forms | conversations | images | chats]. Peace and
attack take turns, after a first attack that is not measured, in which programs compile. Beside ``chats``,
which are ordinary ones, it says what as many connections of an honest tenant cost. Beside ``images`` the
model sees, and all samples must have the same bits.
"""

import base64
import itertools
import json
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from spmd_tx.demo import tiny_model
from tests.fuzz.calls import API, BASE_MODEL, OPENAI
from tests.fuzz.odd_grammars import GRAMMARS, PERSON, REGEXES, SCHEMAS
from tests.fuzz.odd_images import files
from tests.fuzz.option_sets import write_model
from tests.fuzz.served import Served, serving

ATTACKERS = 6  # connections
TURNS = 3  # of peace and attack
PAUSE = 0.05  # seconds between two questions of the neighbour
TIMEOUT = 120.0  # seconds, for one answer

Ask = Callable[[], None]
Calls = Iterator[tuple[str, dict[str, Any]]]  # paths and bodies
Hostile = Callable[[], Calls]
CHAT = OPENAI + "chat/completions"
SEEING = replace(tiny_model.PRESETS["tiny"], family="qwen3_vl", sees=True)


def main() -> None:
    seconds = float(sys.argv[1]) if len(sys.argv) > 1 else 20.0
    hostile = ATTACKS[sys.argv[2]] if len(sys.argv) > 2 else forms
    with tempfile.TemporaryDirectory() as folder:
        model_dir, options = write_model(Path(folder) / "model"), dict[str, object]()
        if hostile is images:
            model_dir, options = tiny_model.write(Path(folder) / "seeing", SEEING), {"batch_invariant": True}
        with serving(Path(folder) / "run", model_dir, None, real=True, options=options) as served:
            assert served.start(), served.log.read_text()[-5000:]
            waits, answers = measure(served, seconds, hostile)
            assert served.is_alive()
    print(f"hostile requests, by the status of their answers: {dict(sorted(answers.items()))}")
    for what, found in waits.items():
        print(f"{what}: in peace {shown(found[False])}; beside the attack {shown(found[True])}")


def measure(
    served: Served, seconds: float, hostile: Hostile
) -> tuple[dict[str, dict[bool, list[float]]], Counter[int]]:
    """Return the neighbour's waits in seconds, by what she asks and whether she is beside the attack.

    Then the statuses of the answers to the attacker.
    """
    schemas = (PERSON | {"title": f"person {number}"} for number in itertools.count())
    with client(served.url, served.tokens["alice"]) as http:
        asks = {
            "healthz": lambda: get(http, "/healthz"),
            "sample": sampler(http, must_repeat=hostile is images),
            "chat with a new schema": lambda: chat(http, next(schemas)),
        }
        waits = {what: {False: list[float](), True: list[float]()} for what in asks}
        for ask in asks.values():
            ask()  # programs compile
        answers = Counter[int]()
        for turn_number, is_attacked in enumerate([True, *([False, True] * TURNS)]):
            # In a process of its own: the attacker's work is not to hold up the neighbour's clock.
            with ProcessPoolExecutor(1, get_context("spawn")) as process:
                attacks = [
                    process.submit(attack, served.url, served.tokens["mallory"], hostile, seconds)
                    for _ in range(is_attacked)
                ]
                deadline = time.monotonic() + seconds
                while time.monotonic() < deadline:
                    for what, ask in asks.items():
                        began = time.monotonic()
                        ask()
                        if turn_number > 0:
                            waits[what][is_attacked].append(time.monotonic() - began)
                        time.sleep(PAUSE)
                answers += sum((each.result() for each in attacks), Counter[int]())
    return waits, answers


def client(url: str, key: str) -> httpx.Client:
    return httpx.Client(base_url=url, headers={"x-api-key": key}, timeout=TIMEOUT)


def sampler(http: httpx.Client, *, must_repeat: bool) -> Ask:
    """Return what draws 8 tokens of the base model and waits for them; they may have to be the same again."""
    session = post(http, API + "create_session", {"tags": []})["session_id"]
    new = {"session_id": session, "base_model": BASE_MODEL, "sampling_session_seq_id": 0}
    post(http, API + "create_sampling_session", new)
    numbers, first = itertools.count(1), list[bytes]()

    def sample() -> None:
        body = {
            "sampling_session_id": f"{session}:sample:0",
            "seq_id": next(numbers),
            "prompt": {"chunks": [{"tokens": [5, 6, 7], "type": "encoded_text"}]},
            "sampling_params": {"max_tokens": 8, "seed": 1, "stop": []},
        }
        request_id = post(http, API + "asample", body)["request_id"]
        answer = http.post(API + "retrieve_future", json={"request_id": request_id})
        while answer.status_code == 408:
            answer = http.post(API + "retrieve_future", json={"request_id": request_id})
        found = answer.raise_for_status().content
        first.extend([] if first else [found])
        assert not must_repeat or found == first[0], f"{found} beside an attack, {first[0]} before"

    return sample


def chat(http: httpx.Client, schema: object) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema, "strict": True}}
    post(http, CHAT, turn() | {"response_format": form})


def turn() -> dict[str, Any]:
    return {"model": BASE_MODEL, "messages": [{"role": "user", "content": "b"}], "max_tokens": 8}


def get(http: httpx.Client, path: str) -> None:
    http.get(path).raise_for_status()


def post(http: httpx.Client, path: str, body: dict[str, Any]) -> dict[str, Any]:
    answer = http.post(path, json=body)
    assert answer.is_success, answer.text
    return answer.json()


def forms() -> Calls:
    """Yield all of the fuzzer's forms of answers, again and again."""
    formats = [
        {"type": "json_schema", "json_schema": {"name": "a", "schema": make(), "strict": True}}
        for make in SCHEMAS
    ]
    every = [
        *({"response_format": each} for each in formats),
        *({"regex": each} for each in REGEXES),
        *({"grammar": each} for each in GRAMMARS),
    ]
    return itertools.cycle([(CHAT, each) for each in every])


def conversations() -> Calls:
    """Yield blanks, tools by the megabyte, forged ids and branches of one trajectory, again and again."""
    asked = {"role": "user", "content": "b"}
    function = {"type": "function", "function": {"name": "f", "arguments": "{" * 10_000}}
    for number in itertools.count():
        call = {"id": f"call_{number:024}", **function}
        blank = {"role": "assistant", "content": " " * 100_000}
        forged = {"role": "assistant", "content": None, "tool_calls": [call] * 50}
        tool = {"type": "function", "function": {"name": "f", "description": "x" * (1 << 20)}}
        many = [{"type": "function", "function": {"name": f"f{each}"}} for each in range(10_000)]
        yield CHAT, {"messages": [asked, blank, asked]}
        yield CHAT, {"messages": [asked, forged, asked]}
        yield CHAT, {"tools": [tool]}
        yield CHAT, {"tools": many}
        yield CHAT, {"messages": [asked, asked] * 2000}
        for _ in range(8):
            yield f"/oai/api/in/branches-{number // 100}/v1/chat/completions", {}


def chats() -> Calls:
    """Yield an ordinary chat, again and again."""
    return itertools.repeat((CHAT, {}))


def images() -> Calls:
    """Yield chats about odd files, always other ones."""
    for content in files():
        kind = "jpeg" if content.startswith(b"\xff\xd8") else "png"
        url = f"data:image/{kind};base64,{base64.b64encode(content).decode()}"
        parts = [{"type": "text", "text": "b"}, {"type": "image_url", "image_url": {"url": url}}]
        yield CHAT, {"messages": [{"role": "user", "content": parts}]}


ATTACKS: dict[str, Hostile] = {
    "forms": forms,
    "conversations": conversations,
    "images": images,
    "chats": chats,
}


def attack(url: str, key: str, hostile: Hostile, seconds: float) -> Counter[int]:
    """Send calls over all connections for so long. Returns the statuses of the answers."""
    deadline, bodies, lock = time.monotonic() + seconds, hostile(), threading.Lock()

    def send() -> Counter[int]:
        answered = Counter[int]()
        with client(url, key) as http:
            while time.monotonic() < deadline:
                with lock:
                    path, body = next(bodies)
                content = json.dumps(turn() | {"max_tokens": 32} | body).encode("utf-8", "surrogatepass")
                answer = http.post(path, content=content, headers={"content-type": "application/json"})
                assert answer.status_code < 500 or answer.status_code == 503, answer.text
                answered[answer.status_code] += 1
        return answered

    with ThreadPoolExecutor(ATTACKERS) as threads:
        sent = [threads.submit(send) for _ in range(ATTACKERS)]
        return sum((each.result() for each in sent), Counter[int]())


def shown(waits: list[float]) -> str:
    p50, p90, p99 = (1000 * np.percentile(waits, part) for part in (50, 90, 99))
    return (
        f"p50 {p50:.0f} ms, p90 {p90:.0f} ms, p99 {p99:.0f} ms, longest {1000 * max(waits):.0f} ms "
        f"of {len(waits)}"
    )


if __name__ == "__main__":
    main()
