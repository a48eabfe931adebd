"""Commands with images: what is computed behind them is what transformers computes."""

import jax
import numpy as np
import pytest

from spmd_tx.protocol.commands import AdapterSpec, ForwardBackward
from tests.golden.vision_cases import CONFIGS, FROM, GREEDY, KEPT, NUMBERS, ROWS, is_image, sloped
from tests.support import moves, seeing_engine
from tests.support.seeing_engine import encode_prompt, places, prompt, start

pytestmark = pytest.mark.usefixtures("quickly_compiled")

GOLDEN = np.load(NUMBERS)
CLOSE, CLOSE_OF_LINEAR = 2e-5, 1e-4  # nats; linear attention divides by sums that nearly cancel
GRADIENT = 1e-4  # of the largest number of a factor
ADAPTER = AdapterSpec(rank=2)
QUICK = ("qwen3_5", (1, 1, 2))
OTHERS = [(name, shape) for name in CONFIGS for shape in ((1, 1, 1), (2, 1, 2), (1, 2, 2), (2, 2, 2))]


@pytest.fixture(
    scope="module",
    params=[
        QUICK,
        *(pytest.param(each, marks=pytest.mark.slow) for each in OTHERS),
    ],
    ids=lambda param: f"{param[0]}-{'x'.join(map(str, param[1]))}",
)
def setting(request, tmp_path_factory):
    """The model's name, and an engine that has the prompt's images."""
    name, shape = request.param
    engine = start(tmp_path_factory.mktemp("model"), name, shape)
    encode_prompt(engine)
    engine.execute(moves.create_adapter(0, 5, ADAPTER))  # which changes nothing yet
    return name, engine


def close(name):
    return CLOSE if "vl" in name else CLOSE_OF_LINEAR


def expected(name, tokens):
    """The log-probabilities of what follows ROWS, where it is text."""
    rows = [row for row in ROWS[:-1] if not is_image()[row + 1]]
    logits = GOLDEN[f"{name}/logits"][[ROWS.index(row) for row in rows]]
    logprobs = np.asarray(jax.nn.log_softmax(logits))
    return rows, logprobs[np.arange(len(rows)), tokens[np.array(rows) + 1]]


@pytest.mark.slow  # test_full_engine.py trains on images by default
def test_training_rows_have_the_log_probabilities_of_transformers(setting):
    name, engine = setting
    rows, wanted = expected(name, prompt())
    assert len(rows) >= 5
    row = seeing_engine.row_of(engine, prompt(), places(name))
    loss = seeing_engine.loss(row, FROM)
    arrays, _ = engine.execute(ForwardBackward(rows=row, loss=loss))
    logprobs, losses = (np.asarray(arrays[each])[-1] for each in ("logprobs", "losses"))
    np.testing.assert_allclose(logprobs[rows], wanted, rtol=0, atol=close(name))
    assert np.array_equal(losses, -logprobs * loss.weights[-1])
    w, gradient = engine.state.train.w.layers, engine.state.train.grad_sum.layers
    for each in sloped(engine.model):
        found = np.asarray(gradient[each].b)[:, 0, :, :KEPT]
        wanted = ADAPTER.scale * np.asarray(w[each].a)[:, 0] @ GOLDEN[f"{name}/slope/{each}"]
        np.testing.assert_allclose(found, wanted, rtol=0, atol=GRADIENT * np.abs(wanted).max(), err_msg=each)


def test_a_prompt_in_pieces_goes_on_as_with_transformers(setting):
    name, engine = setting
    tokens, where = prompt(), places(name)
    read = seeing_engine.prefill(engine, tokens, where)
    rows, wanted = expected(name, tokens)
    np.testing.assert_allclose(read[rows], wanted, rtol=0, atol=close(name))

    last = len(tokens) - 1
    shift = int(where[-1, 0]) - last
    assert shift < 0
    drawn, logprobs = seeing_engine.decode(engine, int(tokens[-1]), last, shift, GREEDY)
    assert drawn == GOLDEN[f"{name}/greedy"].tolist()
    np.testing.assert_allclose(logprobs, GOLDEN[f"{name}/greedy_logprobs"], rtol=0, atol=close(name))


def test_the_plan_shows_what_images_take(setting):
    name, engine = setting
    plan, tower = engine.plan, engine.state.tower
    assert plan.image_tokens == seeing_engine.POOL
    of_device = [leaf.addressable_shards[0].data.nbytes for leaf in jax.tree.leaves(tower)]
    assert plan.tower_bytes == sum(of_device)
    planes = 3 if "vl" in name else 1
    assert plan.image_bytes == planes * seeing_engine.POOL * 32 * 4 // engine.setup.tp
    assert "encode 1 x 2048" in plan.step_needs


@pytest.mark.slow
@pytest.mark.parametrize("name", CONFIGS)
def test_gradients_on_a_mesh_are_those_of_one_device(tmp_path, name):
    found = []
    for shape in ((1, 1, 1), (2, 1, 2)):
        engine = start(tmp_path / str(shape), name, shape)
        encode_prompt(engine)
        engine.execute(moves.create_adapter(0, 5, ADAPTER))
        row = seeing_engine.row_of(engine, prompt(), places(name))
        engine.execute(ForwardBackward(rows=row, loss=seeing_engine.loss(row)))
        found.append([np.asarray(leaf) for leaf in jax.tree.leaves(engine.state.train.grad_sum)])
    assert any(np.abs(leaf).max() > 0 for leaf in found[0])
    for one, several in zip(*found, strict=True):
        np.testing.assert_allclose(several, one, rtol=0, atol=1e-4 * max(np.abs(one).max(), 1e-6))
