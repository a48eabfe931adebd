from dataclasses import replace

from spmd_tx.coordinator.training.advantages import advantages_of_samples
from spmd_tx.coordinator.wire.training_protobuf import TokenSpan
from tests.coordinator.training.packed_requests import PPO, packed, reinforced, supervised


def datum(advantages, *spans):
    made = reinforced(len(advantages))
    made.loss_inputs["advantages"][:] = advantages
    return replace(made, target_spans=tuple(TokenSpan(*span) for span in spans))


def test_the_mean_over_tokens_with_an_advantage_belongs_to_the_sample():
    datums = [
        datum([0, 0, 1.5, 0, 0.5], ("a:0", False, 0, 2), ("a:0", True, 0, 3)),
        datum([0, -1, -1], ("a:0", False, 0, 1), ("a:1", True, 0, 2)),
        datum([0, 0], ("b:7", False, 0, 1), ("b:7", True, 0, 1)),  # learned nothing
        datum([2, 0, 4], ("c:0", True, 0, 1), ("d:0", False, 0, 1), ("c:0", True, 1, 1)),  # in two pieces
    ]
    assert advantages_of_samples(datums).advantages == {
        "a": {0: 1.0, 1: -1.0},
        "b": {7: 0.0},
        "c": {0: 3.0},
    }


def test_spans_that_name_no_sample_say_nothing():
    assert advantages_of_samples([datum([1, 1], ("no sample", True, 0, 2)), reinforced(3)]).advantages == {}


def test_only_losses_with_advantages_learn_from_samples():
    assert packed([datum([1.0], ("a:0", True, 0, 1))], loss=PPO).learned.advantages == {"a": {0: 1.0}}
    assert packed([supervised(3)]).learned is None
