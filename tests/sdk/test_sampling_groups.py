"""A base model that one group of workers trains while others sample it, through losses of each."""

import json
import os
import random
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import get_args

import httpx
import numpy as np
import pytest
import tinker

from spmd_tx.coordinator.bases.health import GroupPhase
from tests.sdk.examples import SECONDS, batch, digests, drawn, logprobs_of, prompt, random_tokens, reinforced
from tests.sdk.server import (
    BASE_MODEL,
    COMMAND,
    QUICKLY,
    Server,
    generation_of,
    groups_of,
    workers_of_group,
)
from tests.support.ports import free_port

ROLLOUTS = "rollouts"
PHASES = get_args(GroupPhase)
PROMPTS = [random_tokens(length, seed=3) for length in (6, 30)]
WANTED = 256  # tokens below are rewarded
DRAWN = 12  # tokens
ADAM = tinker.AdamParams(learning_rate=0.03)
OPTIONS = {"batch_invariant": True, "snapshot_seconds": 0, "group": f"name={ROLLOUTS},role=sample"}


class Address:
    """Servers at one address, one after the other, with one data directory."""

    def __init__(self, model_dir: Path, data_dir: Path, **options: object) -> None:
        self._arguments = model_dir, data_dir
        self._options = {"port": free_port(), **OPTIONS, **options}
        self.start()

    def start(self) -> None:
        self.server = Server(*self._arguments, **self._options)
        self.server.wait_until_ready()

    def kill_coordinator(self) -> None:
        self.server.process.kill()
        self.server.process.wait()
        self.start()

    def kill(self, group: str) -> None:
        os.kill(workers_of_group(self.server, group)[0], signal.SIGKILL)


@contextmanager
def serving_both(model_dir: Path, data_dir: Path, **options: object) -> Iterator[Address]:
    address = Address(model_dir, data_dir, **options)
    try:
        yield address
    finally:
        address.server.close()


def reward(tokens: list[int]) -> float:
    return float(np.mean([token < WANTED for token in tokens]))


def learn(
    address: Address, steps: int, disturb: Callable[[int], None] = lambda step: None, rank: int = 8
) -> tuple[list, np.ndarray, list[str], list[float]]:
    """Reinforce what is rewarded. Return all that was drawn, scores, digests of the weights, mean rewards.

    With ``rank`` 0 all weights are trained.
    """
    told, rewards = [], []
    with tinker.ServiceClient(base_url=address.server.url, api_key="tml-test") as service:
        trainer = service.create_lora_training_client(BASE_MODEL, rank=rank, seed=1).result(SECONDS)
        for step in range(steps):
            sampler = trainer.save_weights_and_get_sampling_client().result(SECONDS)
            answers = [
                sampler.sample(prompt(tokens), 8, drawn(max_tokens=DRAWN, seed=step)) for tokens in PROMPTS
            ]
            disturb(step)
            data = []
            for tokens, answer in zip(PROMPTS, answers, strict=True):
                sequences = answer.result(SECONDS).sequences
                told.append([(each.tokens, each.logprobs) for each in sequences])
                gains = np.array([reward(each.tokens) for each in sequences])
                rewards.append(float(gains.mean()))
                data += [
                    reinforced(
                        [*tokens, *each.tokens],
                        [0.0] * (len(tokens) - 1) + list(each.logprobs),
                        [0.0] * (len(tokens) - 1) + [gain] * len(each.tokens),
                    )
                    for each, gain in zip(sequences, gains - gains.mean(), strict=True)
                ]
            trainer.forward_backward(data, "importance_sampling")
            trainer.optim_step(ADAM).result(SECONDS)
        scores = logprobs_of(trainer, batch(seed=9))
        path = trainer.save_weights_for_sampler("last").result(SECONDS).path
        return told, scores, digests(address.server.data_dir, path), rewards


def assert_equal(found: tuple, expected: tuple) -> None:
    assert found[0] == expected[0]
    np.testing.assert_array_equal(found[1], expected[1])
    assert found[2:] == expected[2:]


def has_sampled(server: Server, group: str) -> bool:
    """Whether the workers of a group have drawn anything, by what is kept of their programs."""
    folder = server.data_dir if group == "main" else server.data_dir / "groups" / group
    uses = folder / "program_uses.json"
    return uses.exists() and "decode" in json.dumps(json.loads(uses.read_text()))


def both_ready(address: Address) -> None:
    states_are(address, lambda states: set(states.values()) == {"ready"})


def states_are(address: Address, wanted: Callable[[dict[str, str]], bool]) -> None:
    """Wait for states of the groups, by their names."""
    deadline = time.monotonic() + SECONDS
    while not wanted({name: each["state"] for name, each in groups_of(address.server).items()}):
        assert time.monotonic() < deadline, "the groups did not get ready in time"
        time.sleep(0.2)


def assert_same_through_a_kill(address: Address, rank: int = 8) -> None:
    """Learn twice, and the second time kill a worker of the group that samples."""
    both_ready(address)
    generation = generation_of(address.server, "main")
    expected = learn(address, 2, rank=rank)
    found = learn(address, 2, lambda step: address.kill(ROLLOUTS) if step == 1 else None, rank)
    assert_equal(found, expected)
    assert generation_of(address.server, "main") == generation
    both_ready(address)  # also the one that was killed: others did its work until then
    assert_counted(address.server)


def assert_ends_in_order(address: Address) -> None:
    """End it: the group that samples has done so, and left nothing."""
    address.server.terminate()
    assert has_sampled(address.server, ROLLOUTS)
    assert list((address.server.data_dir / "versions").iterdir()) == []


def assert_counted(server: Server) -> None:
    """Metrics tell the loss of the group that samples, its state, where samples went, and what was saved."""
    losses = [metric_of(server, "unannounced_losses_total", group=each) for each in ("main", ROLLOUTS)]
    assert losses == [0, 1]
    for group in ("main", ROLLOUTS):
        states = {state: metric_of(server, "group_state", group=group, state=state) for state in PHASES}
        assert [state for state, is_it in states.items() if is_it] == ["ready"]
    assert metric_of(server, "routed_samples_total", group=ROLLOUTS, why="only") > 0
    assert metric_of(server, "publish_seconds_count", group="main") >= 4


def metric_of(server: Server, name: str, **labels: str) -> float:
    text = httpx.get(f"{server.url}/metrics", timeout=SECONDS).text
    labelled = ",".join(f'{key}="{value}"' for key, value in labels.items())
    found = re.search(rf"^spmd_tx_{name}{{{labelled}}} (.+)$", text, re.MULTILINE)
    assert found, f"there is no {name} of {labels}"
    return float(found[1])


@pytest.mark.slow  # tests/sdk/test_three_groups.py has both, and a teacher
def test_samples_of_new_weights_come_from_the_other_group_also_when_it_is_killed(model_dir, tmp_path):
    with serving_both(model_dir, tmp_path / "data") as address:
        assert_same_through_a_kill(address)
        assert_ends_in_order(address)


@pytest.mark.slow
def test_samples_of_new_whole_models_come_from_the_other_group_also_when_it_is_killed(model_dir, tmp_path):
    with serving_both(model_dir, tmp_path / "data", full_parameters=True) as address:
        assert_same_through_a_kill(address, rank=0)
        assert_ends_in_order(address)


@pytest.mark.slow
def test_a_group_of_two_processes_samples_for_another_also_when_one_of_them_is_killed(model_dir, tmp_path):
    two = f"{OPTIONS['group']},num_processes=2,fully_sharded_data_parallel_size=2"
    with serving_both(model_dir, tmp_path / "data", group=two) as address:
        assert_same_through_a_kill(address)
        assert_ends_in_order(address)


@pytest.mark.slow
def test_in_flight_samples_come_from_the_other_group_and_have_the_newest_weights(model_dir, tmp_path):
    with serving_both(model_dir, tmp_path / "data") as address:
        both_ready(address)
        with tinker.ServiceClient(base_url=address.server.url, api_key="tml-test") as service:
            trainer = service.create_lora_training_client(BASE_MODEL, rank=8, seed=1).result(SECONDS)
            in_flight, told = [], []
            for step in range(4):
                trainer.forward_backward(batch(seed=step), "cross_entropy")
                trainer.optim_step(ADAM).result(SECONDS)
                save = trainer.save_weights_and_get_sampling_client(kind="inflight")
                in_flight.append(save.result(SECONDS))
                frozen = trainer.save_weights_and_get_sampling_client().result(SECONDS)
                if step == 2:
                    address.kill(ROLLOUTS)
                elif step == 3:
                    address.kill_coordinator()
                told.append(drawn_by(frozen))
                assert [drawn_by(sampler) for sampler in in_flight] == [told[-1]] * len(in_flight)
        assert len({tuple(logprobs) for _, logprobs in told}) == len(told)
        address.server.terminate()
        assert has_sampled(address.server, ROLLOUTS)
        assert list((tmp_path / "data" / "versions").iterdir()) == []


def drawn_by(sampler: tinker.SamplingClient) -> tuple[list[int], list[float] | None]:
    answer = sampler.sample(prompt(PROMPTS[0]), 1, drawn(max_tokens=DRAWN, seed=7)).result(SECONDS)
    return answer.sequences[0].tokens, answer.sequences[0].logprobs


@pytest.mark.slow
@pytest.mark.parametrize("database", ["SQLite", "PostgreSQL"])
def test_a_loop_learns_from_samples_of_another_group_through_losses_of_all(
    model_dir, tmp_path, request, database
):
    postgres = request.getfixturevalue("postgres") if database == "PostgreSQL" else None
    options = {} if postgres is None else {"database_url": postgres.get_uri()}
    with serving_both(model_dir, tmp_path / "data", **options) as address:
        both_ready(address)
        expected = learn(address, 8)
        rewards = expected[-1]
        assert np.mean(rewards[-4:]) > np.mean(rewards[:4]) + 0.1
        losses = {2: lambda: address.kill(ROLLOUTS), 4: lambda: address.kill("main")}
        losses[6] = address.kill_coordinator
        assert_equal(learn(address, 8, lambda step: losses.get(step, lambda: None)()), expected)
        address.server.terminate()
        assert list((tmp_path / "data" / "versions").iterdir()) == []


@pytest.mark.slow
def test_a_sampler_that_has_to_leave_ends_its_samples_or_hands_them_over(model_dir, tmp_path):
    secret, port = {"SPMD_TX_SECRET": "a secret of this test"}, free_port()
    options = {"worker_port": port, "environment": QUICKLY | secret}
    joins = f"name={ROLLOUTS},role=sample,local_processes=0"
    command = [
        COMMAND,
        "worker",
        "--coordinator",
        f"127.0.0.1:{port}",
        "--group",
        ROLLOUTS,
        "--process-id",
        "0",
    ]

    def draw(address: Address, disturb: Callable[[], None]) -> list:
        with tinker.ServiceClient(base_url=address.server.url, api_key="tml-test") as service:
            sampler = service.create_sampling_client(base_model=BASE_MODEL).result(SECONDS)
            lengths = [(number, 400 if number % 2 else 10) for number in range(24)]
            answers = [sampler.sample(prompt(PROMPTS[0]), 1, drawn(count, seed)) for seed, count in lengths]
            disturb()
            return [
                (each.tokens, each.logprobs) for each in (one.result(SECONDS).sequences[0] for one in answers)
            ]

    with serving_both(model_dir, tmp_path / "data", **options, group=joins) as address:
        for patience in ("0.5", "20"):  # too short for all to end, and long enough
            with subprocess.Popen(
                [*command, "--leave-seconds", patience], env=os.environ | QUICKLY | secret
            ) as worker:
                both_ready(address)
                expected = draw(address, lambda: None)

                def leave(worker: subprocess.Popen[bytes] = worker) -> None:
                    time.sleep(0.5)  # some samples are under way
                    worker.terminate()

                assert draw(address, leave) == expected
                assert worker.wait(SECONDS) == 0
        assert "has to leave within" in address.server.log


def converse(address: Address, conversations: int, turns: int) -> float:
    """Draw turns of several conversations at once; return which share of prompts was in a prefix cache."""
    with tinker.ServiceClient(base_url=address.server.url, api_key="tml-test") as service:
        sampler = service.create_sampling_client(base_model=BASE_MODEL).result(SECONDS)
        told = [random_tokens(80, seed=number) for number in range(conversations)]
        before = prompts_of(address.server)
        for turn in range(turns):
            answers = [sampler.sample(prompt(tokens), 1, drawn(DRAWN, seed=turn)) for tokens in told]
            for tokens, answer in zip(told, answers, strict=True):
                tokens += answer.result(SECONDS).sequences[0].tokens + random_tokens(30, seed=turn)
        read, cached = (
            after - known for after, known in zip(prompts_of(address.server), before, strict=True)
        )
    return cached / read


def prompts_of(server: Server) -> tuple[float, float]:
    """Return the tokens of all prompts, and those of them that were found in a prefix cache."""
    text = httpx.get(f"{server.url}/metrics", timeout=SECONDS).text
    read, cached = (
        sum(map(float, re.findall(rf"^spmd_tx_prompt_tokens{what}_total{{.*}} (.+)$", text, re.MULTILINE)))
        for what in ("", "_cached")
    )
    return read, cached


@pytest.mark.slow
def test_two_groups_find_as_much_of_conversations_in_their_caches_as_one(model_dir, tmp_path):
    shares = []
    for names in (["a"], ["a", "b"]):
        groups = [f"name={name},role=sample" for name in names]
        with serving_both(model_dir, tmp_path / f"data-{len(names)}", group=groups) as address:
            both_ready(address)
            shares.append(converse(address, conversations=8, turns=6))
            address.server.terminate()
            assert all(has_sampled(address.server, name) for name in names)
    alone, beside = shares
    print(f"found in the prefix cache of one group: {alone:.1%}, of two: {beside:.1%}")
    assert alone > 0.5
    assert beside >= 0.9 * alone


@pytest.mark.slow
def test_weights_of_an_object_store_reach_a_group_that_samples(model_dir, tmp_path):
    store = f"file://{tmp_path}/bucket"
    with serving_both(model_dir, tmp_path / "data", checkpoints_base=store) as address:
        both_ready(address)
        with tinker.ServiceClient(base_url=address.server.url, api_key="tml-test") as service:
            trainer = service.create_lora_training_client(BASE_MODEL, rank=8, seed=1).result(SECONDS)
            trainer.forward_backward(batch(seed=1), "cross_entropy")
            trainer.optim_step(ADAM).result(SECONDS)
            path = trainer.save_weights_for_sampler("named").result(SECONDS).path
            fresh = trainer.save_weights_and_get_sampling_client().result(SECONDS)
            expected = drawn_by(fresh)
            shutil.rmtree(tmp_path / "data" / "checkpoints")  # what was fetched, or is to be sent
            address.kill_coordinator()
            both_ready(address)
        with tinker.ServiceClient(base_url=address.server.url, api_key="tml-test") as service:
            assert drawn_by(service.create_sampling_client(path).result(SECONDS)) == expected
        address.server.terminate()
        assert has_sampled(address.server, ROLLOUTS)


# Runs a program as on a host that sees nothing of the data directory but its own folder, and the versions.
SPOT_HOST = """
set -e
data=$1 own=$1/groups/$2 && shift 2
kept=$(mktemp -d) && mkdir "$kept/versions" "$kept/own" && mkdir -p "$own"
mount --bind "$data/versions" "$kept/versions" && mount -o remount,ro,bind "$kept/versions"
mount --bind "$own" "$kept/own"
mount -t tmpfs none "$data" && mkdir -p "$data/versions" "$own"
mount --move "$kept/versions" "$data/versions" && mount --move "$kept/own" "$own"
mount -o remount,ro "$data"
exec "$@"
"""


class LateWorkers:
    """Agents without numbers, which may join the replicas of a group, leave and be killed."""

    def __init__(self, data_dir: Path, processes: int = 1, *, is_spot: bool = False) -> None:
        """``processes`` are those of a replica. ``is_spot``: they see of ``data_dir`` what they need only."""
        port, self._secret = free_port(), {"SPMD_TX_SECRET": "a secret of this test"}
        joins = f"name={ROLLOUTS},role=sample,replicas=3,num_processes={processes}"
        self.options = {
            "worker_port": port,
            "environment": QUICKLY | self._secret,
            "group": f"{joins},fully_sharded_data_parallel_size={processes}",
        }
        self._command = [COMMAND, "worker", "--coordinator", f"127.0.0.1:{port}", "--group", ROLLOUTS]
        if is_spot:
            self._command = ["unshare", "-m", "sh", "-c", SPOT_HOST, "sh", data_dir, ROLLOUTS, *self._command]
        self._processes = processes
        self.all = list[subprocess.Popen[bytes]]()

    @property
    def here(self) -> list[subprocess.Popen[bytes]]:
        return [each for each in self.all if each.poll() is None]

    def join(self) -> None:
        """Start the workers of one more replica."""
        for _ in range(self._processes):
            self.all.append(subprocess.Popen(self._command, env=os.environ | QUICKLY | self._secret))

    def end(self) -> None:
        for each in self.here:
            each.terminate()
        for each in self.all:
            each.wait(SECONDS)


@contextmanager
def serving_replicas(model_dir: Path, data_dir: Path, late: LateWorkers) -> Iterator[Address]:
    with serving_both(model_dir, data_dir, **late.options) as address:
        try:
            yield address
        finally:
            late.end()


def replicas_ready(address: Address, count: int) -> None:
    states_are(
        address,
        lambda states: [states[f"{ROLLOUTS}/{number}"] for number in range(3)].count("ready") == count,
    )


@pytest.mark.slow
@pytest.mark.parametrize(("processes", "is_spot"), [(1, True), (2, False)])
def test_workers_join_late_as_replicas_and_leave_while_another_group_trains(
    model_dir, tmp_path, processes, is_spot
):
    """One leaves as on a spot host, another one is killed, and more join meanwhile."""
    if is_spot and subprocess.run(["unshare", "-m", "true"]).returncode:
        pytest.skip("a host that sees some folders only needs mount namespaces")
    late = LateWorkers(tmp_path / "data", processes, is_spot=is_spot)
    with serving_replicas(model_dir, tmp_path / "data", late) as address:
        expected = learn(address, 4)
        generation = generation_of(address.server, "main")
        states_are(address, lambda states: list(states.values())[1:] == ["waiting for agents"] * 3)
        for _ in range(2):
            late.join()
        replicas_ready(address, 2)

        def disturb(step: int) -> None:
            if step == 1:
                late.all[0].terminate()
                late.join()
            elif step == 2:
                late.all[processes].kill()
                late.join()

        assert_equal(learn(address, 4, disturb), expected)
        assert late.all[0].wait(SECONDS) == 0
        replicas_ready(address, 2 if processes == 1 else 3)
        assert learn(address, 1)[0] == expected[0][: len(PROMPTS)]
        assert generation_of(address.server, "main") == generation
        address.server.terminate()
        assert sum(has_sampled(address.server, f"{ROLLOUTS}/{number}") for number in range(3)) > 1
        assert list((tmp_path / "data" / "versions").iterdir()) == []


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_no_bit_changes_while_workers_join_leave_and_are_killed_thirty_times(model_dir, tmp_path):
    late, chance, events = LateWorkers(tmp_path / "data"), random.Random(5), list[str]()
    with serving_replicas(model_dir, tmp_path / "data", late) as address:
        expected = learn(address, 10)
        generation = generation_of(address.server, "main")

        staying = list[subprocess.Popen[bytes]]()

        def disturb(_: int) -> None:
            for _ in range(3):
                event = chance.choice(["join", "leave", "kill"]) if len(staying) > 1 else "join"
                if event == "join":
                    late.join()
                    staying.append(late.all[-1])
                else:
                    worker = staying.pop(chance.randrange(len(staying)))
                    worker.terminate() if event == "leave" else worker.kill()
                events.append(event)
            states_are(address, lambda states: list(states.values())[1:].count("ready") > 0)

        assert_equal(learn(address, 10, disturb), expected)
        assert len(events) == 30
        assert {*events} == {"join", "leave", "kill"}
        assert generation_of(address.server, "main") == generation
        address.server.terminate()
        assert list((tmp_path / "data" / "versions").iterdir()) == []
