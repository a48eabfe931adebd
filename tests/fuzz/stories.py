"""What one client of the fuzzer does in one session: a story follows from its seed and number alone."""

from collections.abc import Callable, Iterator
from random import Random

from tests.fuzz import odd_chats, odd_questions, odd_sampling, odd_training, odd_trajectories
from tests.fuzz.calls import API, BASE_MODEL, Call, Names
from tests.fuzz.oddities import Oddities, Plain, as_json
from tests.fuzz.said_in_vain import said_in_vain

CALLS = 24  # of a story, after those that it begins with

KINDS: dict[Callable[[Oddities, Names], Call], int] = {
    odd_training.forward_backward: 8,
    odd_training.optim_step: 3,
    odd_training.save: 4,
    odd_training.load: 3,
    odd_training.create_model: 1,
    odd_training.create_custom_loss: 3,
    odd_training.custom_batch: 2,
    odd_sampling.sample: 8,
    odd_sampling.create_sampler: 1,
    odd_sampling.ask_for_result: 3,
    odd_chats.complete: 2,
    odd_chats.chat: 2,
    odd_chats.respond: 2,
    odd_chats.message: 2,
    odd_trajectories.turn: 2,
    odd_trajectories.create: 1,
    odd_trajectories.look: 1,
    odd_trajectories.train_on: 1,
    odd_trajectories.about: 1,
    odd_questions.create_session: 1,
    odd_questions.about_session: 2,
    odd_questions.search: 1,
    odd_questions.query: 2,
    odd_questions.about_checkpoint: 4,
    said_in_vain: 6,
}


def told(seed: int, number: int, names: Names) -> Iterator[Call]:
    """The requests of a story, one after the other; ``names`` takes in what is answered meanwhile."""
    random = Random(f"{seed}/{number}")
    odd = Oddities(random)
    yield _plain(random, "create_session", {"tags": [], "sdk_version": "0.38.0"})
    new = {"session_id": names.session, "base_model": BASE_MODEL}
    yield _plain(
        random, "create_model", {**new, "model_seq_id": 0, "lora_config": {"rank": names.rank, "seed": 7}}
    )
    yield _plain(random, "create_sampling_session", {**new, "sampling_session_seq_id": 0})
    yield _plain(random, "asample", first_sample(names))
    if odd.chance(0.4):
        yield from _saved(random, names)
    if odd.chance(0.3):
        yield odd_training.create_custom_loss(Plain(random), names)
    for kind in random.choices(list(KINDS), list(KINDS.values()), k=CALLS):
        yield kind(odd, names)
    if odd.chance(0.4):
        yield odd_questions.finish(odd, names)


def first_sample(names: Names) -> dict[str, object]:
    """One whose tokens can be trained on with ``stable_reinforce``."""
    return {
        "sampling_session_id": names.sampler,
        "seq_id": names.next_sample(),
        "prompt": {"chunks": [{"tokens": [5, 6], "type": "encoded_text"}]},
        "sampling_params": {"max_tokens": 3, "seed": 1, "stop": []},
        "record_stability_info": True,
    }


def _saved(random: Random, names: Names) -> Iterator[Call]:
    """A checkpoint of each kind, which is there when the story goes on; the last one can be downloaded."""
    for route in ("save_weights", "save_weights_for_sampler", "save_weights_external"):
        number = {"model_id": names.model, "seq_id": names.next_training()}
        yield _plain(random, route, {**number, "path": "ck"})
    body = as_json({"request_id": names.latest_request}, random)
    yield Call("POST", f"{API}retrieve_future", body, is_poll=True)
    exports = f"training_runs/{odd_questions.quoted(names.model)}/checkpoints/external_weights"
    yield Call("GET", f"{API}{exports}/ck/external_weights_urls")


def _plain(random: Random, path: str, body: dict[str, object]) -> Call:
    return Call("POST", API + path, as_json(body, random))
