import asyncio

import msgspec
import pytest

from spmd_tx.coordinator.requests.records import DrawnFacts, Failed, Finished, LearnedFacts, Request
from spmd_tx.coordinator.requests.runs import rollout_metrics
from spmd_tx.coordinator.requests.runs.rollout_metrics import (
    CUT_OFF,
    GROUPS,
    LAG,
    LENGTH,
    SAMPLED,
    TRAINED,
    RolloutMetrics,
)
from spmd_tx.coordinator.tenancy.spent import Usage
from spmd_tx.coordinator.wire.training import SaveWeightsForSamplerResult

RUN = "s:train:0"
NOTHING = Finished("application/json", b"{}")


class Story:
    """Outcomes of a session with one model."""

    def __init__(self):
        self.rollouts = RolloutMetrics()

    def tell(self, kind, line, outcome, request_id="r"):
        return self.rollouts.noted(Request(1, request_id, kind, line, 1, "s"), outcome)

    def save(self, sampler, path=None):
        result = SaveWeightsForSamplerResult(path=path, sampling_session_id=sampler)
        self.tell("save_weights_for_sampler", RUN, Finished("application/json", msgspec.json.encode(result)))

    def sample(self, sampler, tokens):
        self.tell("sample", sampler, Finished("x", b"", spent=Usage(prompt=100, sampled=tokens)))

    def draw(self, request_id, prompt, answers, tokens, cut_off=0):
        drawn = DrawnFacts(prompt, answers, cut_off)
        outcome = Finished("x", b"", spent=Usage(sampled=tokens), rollouts=drawn)
        self.tell("sample", "s:sample:0", outcome, request_id)

    def learn(self, advantages, model=RUN):
        self.tell("forward_backward", model, Finished("x", b"", rollouts=LearnedFacts(advantages)))

    def step(self):
        return dict(self.tell("optim_step", RUN, NOTHING).metrics)


@pytest.fixture
def story():
    return Story()


def test_a_step_says_how_much_was_sampled_and_how_many_steps_ago_the_weights_were_saved(story):
    story.save("s:sample:0")
    story.sample("s:sample:0", 10)
    story.sample("s:sample:0", 20)
    assert story.step() == {SAMPLED: 30.0, LAG: 0.0}
    assert story.step() == {}  # nothing was sampled since
    story.save("s:sample:1")
    story.sample("s:sample:0", 5)  # from weights that are two steps old
    story.sample("s:sample:1", 5)
    assert story.step() == {SAMPLED: 10.0, LAG: 1.0}


def test_weights_that_are_saved_again_in_flight_are_new(story):
    story.save("s:sample:0")
    story.step()
    story.save("s:sample:0")
    story.sample("s:sample:0", 5)
    assert story.step() == {SAMPLED: 5.0, LAG: 0.0}


def test_other_samplers_and_failures_count_for_nothing(story):
    story.save(None, path="tinker://s:train:0/sampler_weights/a")
    story.sample("s:sample:7", 5)
    story.save("s:sample:0")
    story.tell("sample", "s:sample:0", Failed("no", "user"))
    assert story.step() == {}


def test_only_the_last_ones_are_remembered(story, monkeypatch):
    monkeypatch.setattr(rollout_metrics, "MOST", 2)
    for number in range(3):
        story.save(f"s:sample:{number}")
    for number in range(3):
        story.sample(f"s:sample:{number}", 1)
    assert story.step() == {SAMPLED: 2.0, LAG: 0.0}


def of_groups(metrics):
    return metrics.get(GROUPS), metrics.get(TRAINED)


def test_a_step_says_how_long_answers_were_and_how_many_were_cut_off(story):
    story.save("s:sample:0")
    story.draw("a", prompt=1, answers=4, tokens=40, cut_off=1)
    story.draw("b", prompt=2, answers=4, tokens=80, cut_off=2)
    metrics = story.step()
    assert (metrics[LENGTH], metrics[CUT_OFF]) == (15.0, 0.375)


def test_a_group_trains_when_a_sample_of_it_gets_an_advantage(story):
    story.save("s:sample:0")
    for request_id, prompt in (("a", 1), ("b", 2), ("c", 3)):
        story.draw(request_id, prompt, answers=2, tokens=8)
    for request_id in ("d1", "d2"):  # one group of two requests
        story.draw(request_id, prompt=4, answers=1, tokens=4)
    story.draw("e", prompt=5, answers=1, tokens=4)  # no group
    story.learn({"a": {0: 0.5, 1: -0.5}, "b": {0: 0.0, 1: 0.0}, "e": {0: 1.0}})
    story.learn({"d2": {0: 1.0}, "d1": {0: -1.0}, "a": {0: 0.5}})
    assert of_groups(story.step()) == (4.0, 2.0)


def test_without_spans_no_step_says_how_many_groups_have_trained(story):
    story.save("s:sample:0")
    story.draw("a", 1, answers=2, tokens=8)
    story.learn({})
    assert of_groups(story.step()) == (1.0, None)
    story.draw("b", 2, answers=2, tokens=8)
    story.learn({"b": {0: 0.0, 1: 0.0}})
    assert of_groups(story.step()) == (1.0, 0.0)
    story.draw("c", 3, answers=2, tokens=8)  # its client leaves it out, as it has no variance
    assert of_groups(story.step()) == (1.0, 0.0)


def test_answers_without_facts_do_not_lengthen_the_others(story):
    story.save("s:sample:0")
    story.draw("a", 1, answers=2, tokens=8)
    story.sample("s:sample:0", 100)
    metrics = story.step()
    assert (metrics[SAMPLED], metrics[LENGTH]) == (108.0, 4.0)


def test_groups_that_train_in_a_later_step_count_there(story):
    story.save("s:sample:0")
    story.draw("a", 1, answers=2, tokens=8)
    story.draw("b", 2, answers=2, tokens=8)
    story.learn({"a": {0: 1.0}})
    assert of_groups(story.step()) == (2.0, 1.0)
    story.learn({"b": {1: 1.0}, "a": {1: -1.0}})
    assert of_groups(story.step()) == (None, 1.0)
    assert of_groups(story.step()) == (None, None)


def test_another_model_changes_neither_groups_nor_advantages(story):
    story.save("s:sample:0")
    story.draw("a", 1, answers=2, tokens=8)
    story.learn({"a": {0: 1.0}}, model="other:train:0")
    assert story.rollouts.advantages(RUN, "a") == {}
    assert story.rollouts.advantages("other:train:0", "a") == {0: 1.0}
    assert of_groups(story.step()) == (1.0, None)


async def test_requests_are_put_in_the_order_of_their_highest_or_lowest_advantage(story):
    story.learn({"a": {0: 0.5, 1: -2.0}, "b": {0: 1.0, 1: -1.0}, "c": {0: 0.0}})
    story.learn({"d": {0: 9.0}}, model="s:train:1")
    assert await story.rollouts.by_advantage(RUN, highest=True) == ["b", "a", "c"]
    assert await story.rollouts.by_advantage(RUN, highest=False) == ["a", "b", "c"]


async def test_the_order_of_many_requests_is_found_beside_other_work_and_keeps_equals_as_they_came(story):
    values = [float(place % 7) for place in range(2000)]
    story.learn({f"{place}": {0: value} for place, value in enumerate(values)})
    finding = asyncio.create_task(story.rollouts.by_advantage(RUN, highest=True))
    await asyncio.sleep(0)
    story.learn({"late": {0: 9.0}})
    found = await finding
    assert found == [str(place) for place in sorted(range(2000), key=lambda each: -values[each])]


def test_what_only_scores_a_prompt_is_no_sample(story):
    story.save("s:sample:0")
    story.step()
    story.sample("s:sample:0", 0)
    assert story.step() == {}


def test_only_the_newest_advantages_are_remembered(story, monkeypatch):
    monkeypatch.setattr(rollout_metrics, "MOST_SAMPLES", 3)
    story.learn({"a": {0: 1.0}, "b": {0: 2.0}})
    story.learn({"a": {1: 3.0}})
    assert story.rollouts.advantages(RUN, "a") == {0: 1.0, 1: 3.0}
    story.learn({"c": {0: 4.0}})
    assert story.rollouts.advantages(RUN, "b") == {}
    assert story.rollouts.advantages(RUN, "a") == {0: 1.0, 1: 3.0}
    assert story.rollouts.advantages(RUN, "c") == {0: 4.0}
