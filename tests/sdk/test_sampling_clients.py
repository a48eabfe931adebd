"""Sampling clients of the real SDK: many requests in flight, copies in other processes, cancellation."""

import multiprocessing
import time
from collections.abc import Callable, Collection

import tinker

from tests.sdk.examples import CONTEXT, SECONDS, batch, drawn, prompt, random_tokens, sample, train

PROMPT = random_tokens(10, seed=0)
ENDLESS = drawn(max_tokens=CONTEXT - len(PROMPT))
COPIES = 3


def draw_in_another_process(
    sampler: tinker.SamplingClient, first_seed: int, answers: "multiprocessing.Queue[dict[int, list[int]]]"
) -> None:
    futures = {
        seed: sampler.sample(prompt(PROMPT), 1, drawn(seed=seed))
        for seed in range(first_seed, first_seed + 8)
    }
    answers.put({seed: future.result(SECONDS).sequences[0].tokens for seed, future in futures.items()})


def test_copies_of_a_sampling_client_sample_from_several_processes_at_once(base_sampler):
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])  # importing the SDK takes longer than all the rest
    answers = context.Queue()
    processes = [
        context.Process(target=draw_in_another_process, args=(base_sampler, 4 * number, answers))
        for number in range(COPIES)
    ]
    for process in processes:
        process.start()
    found = [answers.get(timeout=SECONDS) for _ in processes]
    for process in processes:
        process.join(SECONDS)
        assert process.exitcode == 0
    for answer in found:  # they overlap in their seeds, and would in their numbers, too
        for seed, tokens in answer.items():
            assert tokens == sample(base_sampler, PROMPT, drawn(seed=seed)).tokens


def test_inflight_clients_draw_from_what_their_model_published_last(trainer):
    samplers = []
    for seed in range(3):
        train(trainer, batch(seed))
        save = trainer.save_weights_and_get_sampling_client(kind="inflight")
        samplers.append(save.result(SECONDS))
        frozen = trainer.save_weights_and_get_sampling_client().result(SECONDS)
        expected = frozen.compute_logprobs(prompt(PROMPT)).result(SECONDS)
        for sampler in samplers:
            assert sampler.compute_logprobs(prompt(PROMPT)).result(SECONDS) == expected


def test_cancelled_samples_end_at_once_whether_they_run_or_wait(base_sampler, api, monkeypatch):
    cancelled = []
    cancel = base_sampler.holder.enqueue_cancel
    monkeypatch.setattr(base_sampler.holder, "enqueue_cancel", lambda id: (cancelled.append(id), cancel(id)))
    endless = [base_sampler.sample(prompt(PROMPT), 256, ENDLESS) for _ in range(3)]  # there are 16 rows
    wait_until(lambda: len(waited_for(base_sampler)) == len(endless))
    for future in endless:
        assert future.future().cancel()
    wait_until(lambda: len(cancelled) == len(endless))
    for request_id in cancelled:
        assert api.retrieve(request_id).json() == {
            "error": "the sample was cancelled by its client",
            "category": "user",
        }
    assert len(sample(base_sampler, PROMPT, drawn(max_tokens=4)).tokens) == 4


def waited_for(sampler: tinker.SamplingClient) -> Collection[str]:
    """The requests that the client polls for."""
    poller = sampler._futures_poller
    return () if poller is None else poller._events


def wait_until(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + SECONDS
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.02)
