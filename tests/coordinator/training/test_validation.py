import re
from dataclasses import replace

import numpy as np
import pytest

from spmd_tx.coordinator.training.losses import LOSSES
from spmd_tx.coordinator.training.validation import check_forward_backward, with_ones, without_image_targets
from spmd_tx.coordinator.wire.limits import Limits
from spmd_tx.coordinator.wire.training_protobuf import Datum, ForwardBackwardRequest
from spmd_tx.errors import InvalidRequest
from spmd_tx.images.placed import PlacedImage
from spmd_tx.protocol.commands import LOSS_NAMES, MAX_TARGETS

LIMITS = Limits(vocab_size=100, max_context=8, max_rank=4)
TOKENS = np.arange(1, 5, dtype=np.int32)
INPUTS = {
    "cross_entropy": {"target_tokens": np.arange(2, 6), "weights": np.ones(4, np.float32)},
    "ppo": {
        "target_tokens": np.arange(2, 6),
        "logprobs": np.full(4, -1.0, np.float32),
        "advantages": np.ones(4, np.float32),
    },
}
INPUTS["gspo"] = INPUTS["ppo"] | {"sequence_ratio_mask": np.ones(4, np.float32)}


def datum(loss_fn: str = "cross_entropy", tokens: np.ndarray = TOKENS, drop: str = "", **changes) -> Datum:
    inputs = {key: value.copy() for key, value in (INPUTS[loss_fn] | changes).items() if key != drop}
    return Datum(tokens, inputs)


def check(*datums: Datum, loss_fn: str = "cross_entropy", config: dict | None = None):
    return check_forward_backward(with_ones(asked(*datums, loss_fn=loss_fn, config=config)), LIMITS)


def asked(*datums: Datum, loss_fn: str, config: dict | None = None) -> ForwardBackwardRequest:
    return ForwardBackwardRequest("s:train:0", 1, False, loss_fn, list(datums), config or {})


def floats(*values: float) -> np.ndarray:
    return np.array(values, np.float32)


def several(count: int, wrong_at: tuple[int, int] | None = None, **changes) -> Datum:
    """A datum with so many targets per position."""
    targets = np.ones((4, count), int)
    if wrong_at:
        targets[wrong_at] = 100
    return datum(**{"target_tokens": targets, "weights": np.ones((4, count), np.float32), **changes})


# --- images -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "first, tokens, counted",
    [(1, 2, [0, 0, 1, 1]), (0, 1, [1, 1, 1, 1]), (0, 2, [0, 1, 1, 1]), (2, 2, [1, 0, 0, 1])],
)
def test_a_target_that_is_a_token_of_an_image_counts_nothing(first, tokens, counted):
    placed = (PlacedImage(first, tokens, "00"),)
    for loss_fn, keys in {
        "cross_entropy": ["weights"],
        "ppo": ["advantages"],
        "gspo": ["advantages", "sequence_ratio_mask"],
    }.items():
        sent = replace(datum(loss_fn), images=placed)
        (seen,) = without_image_targets(asked(sent, loss_fn=loss_fn)).data
        for key in keys:
            assert seen.loss_inputs[key].tolist() == counted
            assert sent.loss_inputs[key].tolist() == [1, 1, 1, 1]
    (seen,) = without_image_targets(asked(replace(several(3), images=placed), loss_fn="cross_entropy")).data
    assert seen.loss_inputs["weights"].tolist() == [[each] * 3 for each in counted]


def test_a_model_that_takes_text_alone_refuses_a_datum_with_an_image():
    with pytest.raises(
        InvalidRequest, match="datum 0: its model_input holds an image, and this model takes text"
    ):
        check(replace(datum(), images=(PlacedImage(1, 2, "00"),)))


# --- losses and their parameters --------------------------------------------------------------------


@pytest.mark.parametrize("loss_fn", LOSSES)
def test_every_loss_is_accepted_with_its_inputs(loss_fn):
    inputs = loss_fn if loss_fn in INPUTS else "ppo"
    loss = check(datum(inputs), loss_fn=loss_fn)
    assert loss.name == LOSS_NAMES[loss.kind] == loss_fn


def test_loss_parameters_have_the_documented_defaults():
    ppo, cispo = check(datum("ppo"), loss_fn="ppo"), check(datum("ppo"), loss_fn="cispo")
    assert (ppo.clip_low, ppo.clip_high) == (0.8, 1.2)
    assert (cispo.clip_low, cispo.clip_high) == (0.0, 4.0)
    assert check(datum("ppo"), loss_fn="dro").beta == 0.05
    gspo = check(datum("gspo"), loss_fn="gspo")
    assert (gspo.clip_low, gspo.clip_high) == (0.9997, 1.0004)


def test_loss_parameters_are_taken_from_the_request():
    loss = check(datum("ppo"), loss_fn="ppo", config={"clip_low_threshold": 0.5})
    assert (loss.clip_low, loss.clip_high) == (0.5, 1.2)


@pytest.mark.parametrize(
    "loss_fn, config, message",
    [
        (
            "grpo",
            {},
            f"loss_fn is 'grpo'; this service has {', '.join(LOSSES)}",
        ),
        ("ppo", {"clip": 1.0}, "the key 'clip'; those of ppo are: clip_low_threshold, clip_high_threshold"),
        ("importance_sampling", {"beta": 1.0}, "the key 'beta'; those of importance_sampling are: none"),
        ("ppo", {"clip_low_threshold": "low"}, "clip_low_threshold is 'low'; it must be a finite number"),
        (
            "ppo",
            {"clip_high_threshold": float("nan")},
            "clip_high_threshold is nan; it must be a finite number",
        ),
        ("dro", {"beta": -1.0}, "beta is -1.0; it must be a finite number, at least 0"),
        ("ppo", {"clip_low_threshold": 1.5}, "clip_low_threshold 1.5 above clip_high_threshold 1.2"),
    ],
)
def test_a_wrong_loss_or_parameter_is_refused(loss_fn, config, message):
    with pytest.raises(InvalidRequest, match=re.escape(message)):
        check(datum("ppo"), loss_fn=loss_fn, config=config)


# --- datums -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "wrong, message",
    [
        (
            datum(drop="target_tokens"),
            "lacks target_tokens; cross_entropy takes target_tokens and, if you like, weights",
        ),
        (several(3, drop="weights"), "lacks weights; only a datum with one target per position may leave it"),
        (datum(drop="weights", target_tokens=np.arange(3)), "target_tokens has the shape [3] and"),
        (datum(target_tokens=np.arange(3)), "target_tokens has the shape [3] and model_input has 4 tokens"),
        (datum(weights=floats(1, 1, 1, 1, 1)), "weights has the shape [5] and model_input has 4 tokens"),
        (datum(target_tokens=np.ones((4, 2), int)), "has the shape [4, 2] and weights has [4]; every target"),
        (several(3, weights=np.ones((4, 2), np.float32)), "the shape [4, 3] and weights has [4, 2]"),
        (several(MAX_TARGETS + 1), f"the shape [4, {MAX_TARGETS + 1}]; a position has at most {MAX_TARGETS}"),
        (several(0), "target_tokens has the shape [4, 0] and model_input has 4 tokens"),
        (several(2, target_tokens=np.ones((3, 2), int)), "has the shape [3, 2] and model_input has 4"),
        (several(2, wrong_at=(2, 1)), "target_tokens has 100 at position 2, target 1; IDs of"),
        (datum(weights=np.float32(1)), "weights has the shape [] and model_input has 4 tokens"),
        (datum(target_tokens=floats(1, 2, 3, 4)), "target_tokens has dtype float32; token IDs are integers"),
        (datum(weights=floats(1, np.nan, 1, 1)), "weights has nan at position 1"),
        (datum(weights=floats(1, 1, 1, -np.inf)), "weights has -inf at position 3"),
        (datum(target_tokens=np.array([2, 3, 4, 100])), "target_tokens has 100 at position 3; IDs of"),
        (datum(target_tokens=np.array([2, -100, 4, 5])), "target_tokens has -100 at position 1"),
        (datum(tokens=np.array([1, 2, 3, 100], np.int32)), "has 100 at position 3; IDs of this"),
        (datum(tokens=np.array([-5, 2, 3, 4], np.int32)), "model_input has -5 at position 0"),
        (datum(tokens=np.zeros(0, np.int32)), "model_input is empty"),
        (datum(tokens=np.ones(9, np.int32)), "model_input has 9 tokens and the context holds 8"),
        (datum(clip_low_threshold=floats(1, 1, 1, 1)), "the key 'clip_low_threshold'; cross_entropy takes"),
        (Datum(TOKENS, {}, problem="a chunk of kind 'image'"), "a chunk of kind 'image'"),
    ],
    ids=lambda value: value[:40] if isinstance(value, str) else "",
)  # fmt: skip
def test_a_datum_that_cannot_be_used_is_named_with_its_number(wrong, message):
    with pytest.raises(InvalidRequest, match=r"^datum 1: .*" + re.escape(message)):
        check(datum(), wrong, datum())


@pytest.mark.parametrize("shape", [(4,), (4, 1)])
def test_weights_that_are_left_out_are_ones(shape):
    targets = np.arange(2, 6).reshape(shape)
    request = with_ones(asked(datum(drop="weights", target_tokens=targets), loss_fn="cross_entropy"))
    (weights,) = (each.loss_inputs["weights"] for each in request.data)
    assert (weights.shape, weights.dtype, set(weights.ravel())) == (shape, np.float32, {1.0})
    check_forward_backward(request, LIMITS)


@pytest.mark.parametrize("loss_fn", ["ppo", "custom", "nonsense"])
def test_other_losses_are_given_no_weights(loss_fn):
    request = asked(datum("ppo"), loss_fn=loss_fn)
    assert with_ones(request) is request


def test_weights_that_are_there_stay():
    sent = datum(weights=floats(0, 2, -1, 0))
    (kept,) = with_ones(asked(sent, loss_fn="cross_entropy")).data
    np.testing.assert_array_equal(kept.loss_inputs["weights"], floats(0, 2, -1, 0))


@pytest.mark.parametrize(
    "wrong, message",
    [
        (datum("ppo", drop="logprobs"), "lacks logprobs; ppo takes target_tokens, logprobs, advantages"),
        (datum("ppo", drop="advantages"), "loss_fn_inputs lacks advantages"),
        (datum("ppo", advantages=floats(1, 1, 1)), "advantages has the shape [3] and model_input has 4"),
        (datum("ppo", logprobs=floats(1, 1, 1)), "logprobs has the shape [3] and model_input has 4 tokens"),
        (datum("ppo", advantages=floats(1, 1, np.inf, 1)), "advantages has inf at position 2"),
        (datum("ppo", logprobs=floats(-1, -1, -np.inf, -1)), "logprobs has -inf at position 2; it must be"),
        (datum("ppo", rewards=floats(1, 1, 1, 1)), "has the key 'rewards'"),
        (datum("ppo", target_tokens=np.ones((4, 2), int)), "the shape [4, 2]; ppo takes one target per"),
        (datum("ppo", clip_low_threshold=floats(1, 1)), "clip_low_threshold has the shape [2] and"),
        (datum("ppo", clip_low_threshold=floats(-1)), "clip_low_threshold has -1.0 at position 0"),
        (datum("ppo", clip_high_threshold=floats(2, 2, np.nan, 2)), "has nan at position 2"),
        (datum("ppo", clip_low_threshold=floats(1.5)), "1.5 is above clip_high_threshold 1.2 at position 0"),
        (
            datum("ppo", clip_low_threshold=floats(0.5), clip_high_threshold=floats(1, 1, 0.25, 1)),
            "clip_low_threshold 0.5 is above clip_high_threshold 0.25 at position 2",
        ),
    ],
    ids=lambda value: value[:40] if isinstance(value, str) else "",
)  # fmt: skip
def test_a_reinforcement_datum_that_cannot_be_used_is_refused(wrong, message):
    with pytest.raises(InvalidRequest, match=r"^datum 0: .*" + re.escape(message)):
        check(wrong, loss_fn="ppo")


@pytest.mark.parametrize(
    "wrong, message",
    [
        (datum("gspo", drop="sequence_ratio_mask"), "lacks sequence_ratio_mask; gspo takes target_tokens,"),
        (datum("gspo", sequence_ratio_mask=floats(1)), "sequence_ratio_mask has the shape [1]"),
        (datum("gspo", sequence_ratio_mask=floats(1, 1, np.nan, 1)), "has nan at position 2; send 1 or 0"),
        (
            datum("gspo", logprobs=floats(-1, -np.inf, -1, -1), advantages=floats(1, 0, 1, 1)),
            "logprobs has -inf at position 1; it must be finite wherever the advantage is not 0, or "
            "sequence_ratio_mask is not",
        ),
    ],
    ids=["no mask", "short mask", "nan", "in the ratio"],
)  # fmt: skip
def test_a_sequence_whose_ratio_cannot_be_known_is_refused(wrong, message):
    with pytest.raises(InvalidRequest, match=r"^datum 0: .*" + re.escape(message)):
        check(wrong, loss_fn="gspo")


@pytest.mark.parametrize("loss_fn", ["importance_sampling", "dro"])
def test_thresholds_are_refused_where_nothing_is_clipped(loss_fn):
    with pytest.raises(InvalidRequest, match="the key 'clip_low_threshold'"):
        check(datum("ppo", clip_low_threshold=floats(1)), loss_fn=loss_fn)


def test_no_datums_are_refused():
    with pytest.raises(InvalidRequest, match="holds no datums"):
        check()


@pytest.mark.parametrize(
    "harmless, loss_fn",
    [
        (datum(weights=floats(-3, 0, 1e30, 0)), "cross_entropy"),  # weights are gradients of custom losses
        (datum(weights=np.array([0, 1, 1, 0])), "cross_entropy"),
        (datum(target_tokens=np.ones((4, 1), int), weights=np.ones((4, 1), np.float32)), "cross_entropy"),
        (several(3), "cross_entropy"),
        (datum(mask=floats(1)), "cross_entropy"),
        (datum("ppo", clip_low_threshold=np.float32(1), clip_high_threshold=floats(1)), "ppo"),
        (datum("ppo", clip_low_threshold=floats(0, 0, 1, 1)), "cispo"),
        (datum("ppo", mask=floats(1), weights=floats(1)), "ppo"),
        (datum("ppo", logprobs=floats(-np.inf, np.nan, -1, -1), advantages=floats(0, 0, 1, 1)), "ppo"),
        (datum("ppo", logprobs=floats(-300, -300, -300, -300)), "importance_sampling"),
        (
            datum(tokens=np.ones(8, np.int32), target_tokens=np.ones(8, int), weights=np.ones(8)),
            "cross_entropy",
        ),
    ],
    ids=[
        "any sign",
        "integer weights",
        "columns",
        "several targets",
        "mask",
        "thresholds of a datum",
        "thresholds of tokens",
        "weights of rl",
        "no advantage",
        "huge ratio",
        "full",
    ],
)
def test_what_only_looks_odd_is_accepted(harmless, loss_fn):
    check(harmless, loss_fn=loss_fn)
