import msgspec
import pytest

from spmd_tx.coordinator.requests.records import Failed, Finished, Request
from spmd_tx.coordinator.requests.runs import sampler_lag
from spmd_tx.coordinator.requests.runs.sampler_lag import LAG, SAMPLED, SamplerLag
from spmd_tx.coordinator.tenancy.spent import Usage
from spmd_tx.coordinator.wire.training import SaveWeightsForSamplerResult

RUN = "s:train:0"
NOTHING = Finished("application/json", b"{}")


class Story:
    """Outcomes of a session with one model."""

    def __init__(self):
        self.lag = SamplerLag()

    def tell(self, kind, line, outcome):
        return self.lag.noted(Request(1, "r", kind, line, 1, "s"), outcome)

    def save(self, sampler, path=None):
        result = SaveWeightsForSamplerResult(path=path, sampling_session_id=sampler)
        self.tell("save_weights_for_sampler", RUN, Finished("application/json", msgspec.json.encode(result)))

    def sample(self, sampler, tokens):
        self.tell("sample", sampler, Finished("x", b"", spent=Usage(prompt=100, sampled=tokens)))

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
    monkeypatch.setattr(sampler_lag, "MOST", 2)
    for number in range(3):
        story.save(f"s:sample:{number}")
    for number in range(3):
        story.sample(f"s:sample:{number}", 1)
    assert story.step() == {SAMPLED: 2.0, LAG: 0.0}
