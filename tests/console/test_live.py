"""The console of a real server, while tenants train and sample on it with the SDK."""

import gc
import itertools
import json
import os
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import anthropic
import httpx
import openai
import pytest
import tinker
from tinker import types
from tokenizers import Tokenizer

from spmd_tx.demo import tiny_model
from tests.console.driver import drive, needs_chromium
from tests.sdk.server import BASE_MODEL, COMMAND, Server, serving

pytestmark = [
    pytest.mark.console,
    needs_chromium,
    pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]

SECONDS = 120  # for one result
CONTEXT = 1024
SPEC = tiny_model.Spec(n_heads=4, n_kv_heads=2, vocab_size=384, max_positions=CONTEXT)
WORDS = {
    "compile": "of this time waiting for programs to be compiled",
    "client": "of this time waiting for its client",
    "device": "of this time computing",
    "queue": "of this time waiting while the devices worked for other runs",
}

Work = Callable[[], object]


class Tenants:
    """Holds a server with the keys of two tenants and of an admin."""

    def __init__(self, server: Server, keys: dict[str, str], tokenizer: Tokenizer) -> None:
        self.server = server
        self.keys = keys
        self.tokenizer = tokenizer

    @contextmanager
    def trainer(self, owner: str, name: str = "run") -> Iterator[tinker.TrainingClient]:
        service = tinker.ServiceClient(base_url=self.server.url, api_key=self.keys[owner])
        metadata = {"name": name}
        trainer = service.create_lora_training_client(BASE_MODEL, rank=8, user_metadata=metadata)
        yield trainer.result(SECONDS)
        service.close("success").result(SECONDS)


@pytest.fixture(scope="module")
def tenants(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tenants]:
    data_dir = tmp_path_factory.mktemp("live") / "data"
    (data_dir / "compilation_cache").mkdir(parents=True)  # of its own: something must be compiled
    model_dir = tiny_model.write(tmp_path_factory.mktemp("model"), SPEC)
    roles = {"alice": "user", "bob": "user", "carol": "user", "root": "admin"}
    keys = {owner: create_key(data_dir, owner, role) for owner, role in roles.items()}
    with serving(model_dir, data_dir, train_tokens=1024) as server:
        server.wait_until_ready()
        yield Tenants(server, keys, Tokenizer.from_file(str(model_dir / "tokenizer.json")))


@pytest.fixture(scope="module", autouse=True)
def sockets_are_collected() -> Iterator[None]:
    """The SDK leaves them to the garbage collector."""
    yield
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        gc.collect()


def create_key(data_dir: Path, owner: str, role: str) -> str:
    return keys_command(data_dir, "create", "--owner", owner, "--role", role).split()[-1]


def keys_command(data_dir: Path, *arguments: str) -> str:
    command = [str(COMMAND), "keys", *arguments, "--data-dir", str(data_dir)]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


@contextmanager
def meanwhile(work: Work) -> Iterator[None]:
    """Do some work again and again."""
    is_over = threading.Event()

    def run() -> None:
        while not is_over.is_set():
            work()

    with ThreadPoolExecutor(1) as thread:
        running = thread.submit(run)
        try:
            yield
        finally:
            is_over.set()
    running.result()


def train(trainer: tinker.TrainingClient, length: int = 60, datums: int = 1) -> None:
    tokens = [1 + n % 300 for n in range(length)]
    inputs = {"target_tokens": tokens, "weights": [1.0] * length}
    datum = types.Datum(model_input=types.ModelInput.from_ints(tokens), loss_fn_inputs=inputs)
    passed = trainer.forward_backward([datum] * datums, "cross_entropy")
    stepped = trainer.optim_step(types.AdamParams(learning_rate=1e-3))
    passed.result(SECONDS)
    stepped.result(SECONDS)


def test_checkpoints_are_downloaded_and_changed_by_their_owner_only(tenants):
    reader = create_key(tenants.server.data_dir, "alice", "read-only")
    with tenants.trainer("alice") as mine, tenants.trainer("bob") as theirs:
        train(mine)
        mine.save_state("to train").result(SECONDS)
        mine.save_weights_for_sampler("to sample").result(SECONDS)
        theirs.save_state("of bob").result(SECONDS)
        facts = {"theirs": "of bob"}
        drive("live_checkpoints", tenants.server.url, key=reader, may_change="no", **facts)
        drive("live_checkpoints", tenants.server.url, key=tenants.keys["alice"], **facts)


def test_the_page_names_compilation(tenants):
    lengths = itertools.cycle([30, 60, 120, 250, 380, 500, 700, 1000])
    with tenants.trainer("alice") as trainer, meanwhile(lambda: train(trainer, next(lengths))):
        see_cause(tenants, trainer, "compile")


def test_the_page_names_a_slow_client(tenants):
    def slowly() -> None:
        train(trainer)
        time.sleep(1.0)

    with tenants.trainer("alice") as trainer, meanwhile(slowly):
        see_cause(tenants, trainer, "client")


def test_the_page_names_the_devices(tenants):
    with tenants.trainer("alice") as trainer, meanwhile(lambda: train(trainer, 1000, datums=16)):
        see_cause(tenants, trainer, "device")


def test_the_page_names_the_queue(tenants):
    with (
        tenants.trainer("alice") as trainer,
        tenants.trainer("bob") as second,
        tenants.trainer("carol") as third,
        meanwhile(lambda: train(second, 1000, datums=16)),
        meanwhile(lambda: train(third, 1000, datums=16)),
        meanwhile(lambda: train(trainer)),
    ):
        see_cause(tenants, trainer, "queue")


def see_cause(tenants: Tenants, trainer: tinker.TrainingClient, cause: str) -> None:
    facts = {"key": tenants.keys["alice"], "run": trainer.model_id, "cause": cause, "words": WORDS[cause]}
    drive("live_timing", tenants.server.url, **facts)


def test_a_killed_client_is_silent(tenants):
    url, key = tenants.server.url, tenants.keys["alice"]
    command = [sys.executable, "-m", "tests.console.lasting_client", url, key, "to be killed"]
    with subprocess.Popen(command, cwd=Path(__file__).parents[2]) as client:
        try:
            drive("live_health", url, {"kill": client.kill}, key=key, name="to be killed")
        finally:
            client.kill()


def test_curves_grow_without_a_reload(tenants):
    with (
        tenants.trainer("alice", "growing") as trainer,
        tenants.trainer("bob") as other,
        meanwhile(lambda: sample(other)),
        meanwhile(lambda: train(trainer)),
    ):
        key = tenants.keys["alice"]

        def add_late() -> None:
            """Add a metric to a step that the page has loaded long ago."""
            address = f"{tenants.server.url}/api/v1/training_runs/{trainer.model_id}/metrics"
            body = {"step": 0, "metrics": {"judged later": 0.5}}
            httpx.post(address, json=body, headers={"X-Api-Key": key}).raise_for_status()

        drive("live_curves", tenants.server.url, {"late": add_late}, key=key, name="growing")


def sample(trainer: tinker.TrainingClient) -> None:
    sampler = trainer.save_weights_and_get_sampling_client().result(SECONDS)
    prompt = types.ModelInput.from_ints([1, 2, 3])
    sampler.sample(prompt, 2, types.SamplingParams(max_tokens=8)).result(SECONDS)


def test_samples_are_shown_as_text_and_searched(tenants):
    with tenants.trainer("alice") as trainer:
        train(trainer)
        sampler = trainer.save_weights_and_get_sampling_client().result(SECONDS)

        def draw(text: str) -> None:
            """Draw four samples: a request of three and one more."""
            prompt = types.ModelInput.from_ints(tenants.tokenizer.encode(text).ids)
            params = types.SamplingParams(max_tokens=8, stop=[])
            drawn = [sampler.sample(prompt, count, params) for count in (3, 1)]
            for each in drawn:
                each.result(SECONDS)

        draw("first: 1 + 2 = ?\n")
        facts = {"prompt": "first: 1 + 2 = ?\n", "later": "second: 3 + 4 = ?"}
        on = {"more": lambda: draw("second: 3 + 4 = ?\n")}
        drive(
            "live_samples", tenants.server.url, on, key=tenants.keys["alice"], run=trainer.model_id, **facts
        )


def test_checkpoints_are_sampled_in_the_playground(tenants):
    reader = create_key(tenants.server.data_dir, "alice", "read-only")
    with tenants.trainer("alice") as trainer:
        train(trainer)
        trainer.save_weights_for_sampler("to play with").result(SECONDS)
        drive("live_playground", tenants.server.url, key=tenants.keys["alice"])
        drive("live_playground", tenants.server.url, key=reader, may_sample="no")


def play(url: str, key: str, name: str) -> None:
    """Chat in a trajectory as two agents do, with a retry and an edited message."""
    first, more = {"role": "user", "content": "Look at 3."}, {"role": "user", "content": "And at 4?"}
    asked = {"model": BASE_MODEL, "max_tokens": 12, "seed": 3, "temperature": 1}
    with openai.OpenAI(base_url=f"{url}/oai/api/in/{name}/v1", api_key=key, timeout=SECONDS) as agent:

        def chat(*messages: object) -> object:
            return agent.chat.completions.create(messages=list(messages), **asked).choices[0].message

        said = chat(first)
        for text in ("And at 4?", "And at 4?", "And at <b>5</b>?"):
            chat(first, said, more | {"content": text})
    with anthropic.Anthropic(
        base_url=f"{url}/anthropic/api/in/{name}", api_key=key, timeout=SECONDS
    ) as agent:
        question = {"role": "user", "content": "Find out more."}
        agent.messages.create(model=BASE_MODEL, max_tokens=12, messages=[question])


def test_a_trajectory_is_a_tree_that_says_why(tenants):
    reader = create_key(tenants.server.data_dir, "alice", "read-only")
    url, keys = tenants.server.url, tenants.keys
    play(url, keys["alice"], "agent-1")
    play(url, keys["bob"], "agent-of-bob")
    headers, routes = {"X-Api-Key": keys["alice"]}, f"{url}/api/v1/trajectories"
    (entry,) = httpx.get(routes, headers=headers).raise_for_status().json()["trajectories"]
    httpx.post(f"{routes}/{entry['id']}/rewards", headers=headers, json={"reward": 0.75}).raise_for_status()
    facts = {"name": "agent-1", "theirs": "agent-of-bob"}
    on = {"more": lambda: play(url, keys["alice"], "agent-2")}
    drive("live_trajectories", url, on, key=reader, **facts)


def test_a_tenant_sees_nothing_of_another(tenants):
    with tenants.trainer("alice", "of alice") as mine, tenants.trainer("bob", "of bob") as theirs:
        train(mine)
        train(theirs)
        sample(theirs)
        request = newest_sample(tenants.server, theirs.model_id, tenants.keys["bob"])
        facts = {"mine": "of alice", "theirs": "of bob", "run": theirs.model_id, "request": request}
        drive("live_isolation", tenants.server.url, key=tenants.keys["alice"], **facts)


def newest_sample(server: Server, run: str, key: str) -> str:
    page = httpx.get(f"{server.url}/console/api/runs/{run}/samples", headers={"X-Api-Key": key})
    return page.raise_for_status().json()["requests"][0]["id"]


def test_a_revoked_key_is_out(tenants):
    key = create_key(tenants.server.data_dir, "dave", "user")
    time.sleep(2.0)  # until the server knows it

    def revoke() -> None:
        listed = json.loads(keys_command(tenants.server.data_dir, "list", "--json"))
        (id,) = (each["id"] for each in listed if each["owner"] == "dave")
        keys_command(tenants.server.data_dir, "revoke", id)

    drive("live_revoked", tenants.server.url, {"revoke": revoke}, key=key)


def test_an_admin_sees_people_and_revokes_a_key(tenants):
    key = create_key(tenants.server.data_dir, "erin", "user")
    with tenants.trainer("alice") as trainer:
        train(trainer)
        drive("live_people", tenants.server.url, key=tenants.keys["root"])
    refused = httpx.get(f"{tenants.server.url}/api/v1/sessions", headers={"X-Api-Key": key})
    assert refused.status_code == 401


def test_a_killed_worker_is_a_new_generation_with_its_reason(tenants):
    with tenants.trainer("alice") as trainer:
        train(trainer)

        def kill() -> None:
            os.kill(tenants.server.worker_pids()[0], signal.SIGKILL)

        drive("live_generations", tenants.server.url, {"kill": kill}, key=tenants.keys["root"])
        train(trainer)
