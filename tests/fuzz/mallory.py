"""The tenant who sends odd requests, over several connections, and keeps book of what was answered."""

import json
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import msgspec

from spmd_tx.custom_loss import definition
from spmd_tx.errors import InvalidRequest
from tests.fuzz import stories
from tests.fuzz.calls import API, Call, Names

CONNECTIONS = 6
SECONDS = 60  # for an answer; what takes longer hangs
PAUSE = 0.1  # seconds between two attempts
POLL_SECONDS = 5  # after which a poll is left
BUSY = 503  # as when the database is locked; the SDK asks again
UNFINISHED = 408  # of a poll
TAKEN = "taken, although it says what nobody reads, or two things at once"
LAST = 12  # calls that are shown of what was sent before a death


@dataclass
class Book:
    """Everything that was sent and answered. Threads share it."""

    log: Path
    findings: list[str] = field(default_factory=list)
    statuses: Counter[int] = field(default_factory=Counter)
    unavailable: Counter[str] = field(default_factory=Counter)  # reasons of 503
    requests: dict[str, str] = field(default_factory=dict)  # by id: the call that it came from
    sessions: list[str] = field(default_factory=list)
    outcomes: Counter[str] = field(default_factory=Counter)  # of futures
    in_vain: set[str] = field(default_factory=set)  # ids of requests that must fail by their sender
    sent: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)
    last: deque[tuple[int, str]] = field(default_factory=lambda: deque(maxlen=LAST))  # with their stories

    def note_sending(self, story: int, line: str) -> None:
        with self.lock:
            self.sent += 1
            self.last.append((story, line))

    def last_calls(self) -> str:
        """What was sent before now, and how to send it again."""
        with self.lock:
            stories = ",".join(map(str, sorted({story for story, _ in self.last})))
            calls = [line for _, line in self.last]
        return "\n    ".join(
            [f"FUZZ_STORIES={stories} plays their stories again; the last calls were", *calls]
        )

    def note(self, line: str, status: int, answer: str) -> None:
        with self.lock, self.log.open("a") as log:
            self.statuses[status] += 1
            log.write(f"{line}\n  -> {status} {answer[:300]!r}\n")
            if status == 503:
                self.unavailable[answer[:120]] += 1
            is_bad = status >= 500 and not ((status == 503 and '"detail"' in answer) or '"message"' in answer)
            if is_bad:
                self.findings.append(f"answered with {status}: {answer[:300]}\n    {line}")

    def note_end(self, line: str, outcome: str, answer: httpx.Response) -> None:
        """Of a future."""
        with self.lock, self.log.open("a") as log:
            self.outcomes[outcome] += 1
            log.write(f"{line}\n  => {outcome} {answer.text[:300]!r}\n")

    def find(self, what: str, line: str) -> None:
        with self.lock:
            self.findings.append(f"{what}\n    {line}")

    def requested(self, request_id: str, line: str) -> None:
        with self.lock:
            self.requests[request_id] = line


class Mallory:
    """Plays stories as long as the server lives."""

    def __init__(
        self, client: tuple[str, str], seed: int, book: Book, is_alive: Callable[[], bool], rank: int
    ) -> None:
        """``client`` has the server's URL and a key; ``rank`` is that of her models."""
        (self._url, self._token), self._seed = client, seed
        self._book, self._is_alive, self._rank = book, is_alive, rank

    def play(self, numbers: Iterable[int]) -> None:
        """Some stories at a time."""
        waiting = iter(numbers)
        lock = threading.Lock()

        def go() -> None:
            with self._client() as client:
                while self._is_alive():
                    with lock:
                        number = next(waiting, None)
                    if number is None:
                        return
                    self._play(client, number)

        with ThreadPoolExecutor(CONNECTIONS) as threads:
            for each in [threads.submit(go) for _ in range(CONNECTIONS)]:
                each.result()

    def _client(self) -> httpx.Client:
        return httpx.Client(base_url=self._url, headers={"x-api-key": self._token}, timeout=SECONDS)

    def _play(self, client: httpx.Client, number: int) -> None:
        names = Names(rank=self._rank)
        for place, call in enumerate(stories.told(self._seed, number, names)):
            line = f"story {number} call {place}: {call}"
            self._book.note_sending(number, line)
            try:
                answer = self.send(client, call)
            except httpx.TimeoutException:
                if not call.is_poll and self._is_alive():
                    self._book.find(f"no answer within {SECONDS} s", line)
                continue
            except httpx.TransportError:
                if not self._is_alive():
                    break
                continue  # a request that HTTP itself cannot carry
            self._book.note(line, answer.status_code, answer.text)
            if call.is_refused and answer.is_success:
                self._expect_failure(answer, line)
            _learn(names, call, answer, lambda request_id, line=line: self._book.requested(request_id, line))
        self._book.sessions.append(names.session)

    def _expect_failure(self, answer: httpx.Response, line: str) -> None:
        told = _json(answer)
        request_id = told.get("request_id") if isinstance(told, dict) else None
        if isinstance(request_id, str):
            self._book.in_vain.add(request_id)
        else:
            self._book.find(f"{TAKEN}: {answer.text[:300]}", line)

    def send(self, client: httpx.Client, call: Call) -> httpx.Response:
        headers = {} if call.body is None else {"content-type": call.content_type}
        url = client.base_url.copy_with(raw_path=call.path.encode())
        timeout = POLL_SECONDS if call.is_poll else SECONDS
        return client.request(call.method, url, content=call.body, headers=headers, timeout=timeout)

    def finish_sessions(self) -> None:
        """Those of all stories so far; some requests in them wait for a number that never comes."""
        with self._client() as client:
            while self._book.sessions:
                path = f"{API}sessions/{self._book.sessions.pop()}/finish"
                body = {"reason": {"type": "success"}}
                _post(client, path, body, [BUSY], time.monotonic() + SECONDS).raise_for_status()

    def settle(self, seconds: float) -> None:
        """Every future ends, and none with an internal error."""
        deadline = time.monotonic() + seconds
        with self._client() as client, ThreadPoolExecutor(CONNECTIONS) as threads:
            for each in [
                threads.submit(self._settle, client, *item, deadline) for item in self._book.requests.items()
            ]:
                each.result()

    def _settle(self, client: httpx.Client, request_id: str, line: str, deadline: float) -> None:
        if time.monotonic() > deadline:
            self._book.find("its future was not asked for, as others took all of the time", line)
            return
        try:
            answer = _post(
                client, API + "retrieve_future", {"request_id": request_id}, [UNFINISHED, BUSY], deadline
            )
        except httpx.TransportError as error:
            self._book.find(f"its future cannot be asked for: {error!r}", line)
            return
        self._judge(answer, line, must_fail=request_id in self._book.in_vain)

    def _judge(self, answer: httpx.Response, line: str, *, must_fail: bool) -> None:
        failed = (
            _json(answer) if answer.headers.get("content-type", "").startswith("application/json") else {}
        )
        category = failed.get("category", "none") if isinstance(failed, dict) else "none"
        self._book.note_end(line, f"{answer.status_code} {category}", answer)
        if answer.status_code == UNFINISHED:
            self._book.find(f"its future has no end: {answer.text[:300]}", line)
        elif answer.status_code >= 500 or category == "server":
            self._book.find(f"its future failed by the server: {answer.text[:500]}", line)
        elif must_fail and category != "user":
            self._book.find(TAKEN, line)


def _post(
    client: httpx.Client, path: str, body: dict[str, Any], again: list[int], deadline: float
) -> httpx.Response:
    """Ask until the status is none of ``again``, or until the deadline."""
    while True:
        answer = client.post(path, json=body)
        if answer.status_code not in again or time.monotonic() > deadline:
            return answer
        time.sleep(PAUSE)


def _learn(names: Names, call: Call, answer: httpx.Response, requested: Callable[[str], None]) -> None:
    """What the next requests need, and the futures that must end."""
    if "location" in answer.headers:
        names.links.append(httpx.URL(answer.headers["location"]).raw_path.decode())
    told = _json(answer)
    if not answer.is_success or not isinstance(told, dict):
        return
    _learn_turn(names, call.path, told)
    if call.path == API + "create_session" and names.session == "none":
        names.session = told["session_id"]
    for url in (told.get("urls") or {}).values():
        names.links.append(httpx.URL(url).raw_path.decode())
    if call.path == API + "retrieve_future" or not isinstance(told.get("request_id"), str):
        return
    requested(told["request_id"])
    names.requests.append(told["request_id"])
    if call.path == API + "create_custom_loss" and call.body is not None:
        try:
            loss = definition.read(definition.decode(call.body))
        except (InvalidRequest, msgspec.DecodeError, RecursionError, ValueError):
            return
        inputs = [{"name": each.name, "rank": each.rank} for each in loss.inputs]
        names.losses.append(("loss-" + told["request_id"], inputs))


def _learn_turn(names: Names, path: str, told: dict[str, Any]) -> None:
    """What an agent has been answered, and the trajectories that there are."""
    if path == API + "trajectories":
        names.trajectories.append(told["id"])
    if path.startswith(API + "trajectories?"):
        names.trajectories += [each["id"] for each in told["trajectories"]][:3]
    dialects = {"chat/completions": "chat", "/responses": "responses", "/messages": "messages"}
    dialect = next((dialects[end] for end in dialects if path.endswith(end)), None)
    if dialect is not None:
        of_chat = [choice["message"] for choice in told.get("choices", ())]
        answered = {"chat": of_chat, "responses": [told.get("output")], "messages": [told.get("content")]}
        names.turns.setdefault(dialect, []).extend(answered[dialect])


def _json(answer: httpx.Response) -> object:
    try:
        return json.loads(answer.content)
    except ValueError:
        return None
