import json

import numpy as np
import pytest

from spmd_tx.custom_loss.limits import LossLimits
from spmd_tx.errors import InvalidRequest
from spmd_tx.protocol import commands
from spmd_tx.worker.custom_loss import interpret
from spmd_tx.worker.custom_loss import run as loss_runs
from spmd_tx.worker.custom_loss.interpret import inputs_of
from spmd_tx.worker.custom_loss.run import SHORTEST_BUCKET, CustomLosses
from spmd_tx.worker.custom_loss.values import LossProblem
from tests.custom_loss.recorded import losses, operations, recorded
from tests.worker.custom_loss.whole_runs import run_all

pytestmark = pytest.mark.usefixtures("plainly_compiled")

LONGEST = "smooth_in_time"  # has the most nodes of the losses


@pytest.fixture(scope="module")
def custom_losses():
    return CustomLosses()


def run(custom_losses, case, data=None):
    names = [each["name"] for each in case.definition["inputs"]]
    return run_all(custom_losses, case.body, [[datum[name] for name in names] for datum in data or case.data])


@pytest.mark.parametrize("name", [*losses(), *operations()])
def test_loss_metrics_and_gradient_are_those_of_torch(custom_losses, name):
    assert_as_torch(custom_losses, recorded()[name], lambda tokens: tokens <= SHORTEST_BUCKET)


@pytest.mark.parametrize(
    "name", [each if each == LONGEST else pytest.param(each, marks=pytest.mark.slow) for each in losses()]
)
def test_longer_datums_get_those_of_torch_from_a_program_of_their_own(custom_losses, name):
    assert_as_torch(custom_losses, recorded()[name], lambda tokens: tokens > SHORTEST_BUCKET)


def assert_as_torch(custom_losses, case, is_chosen):
    """Run a loss on the datums whose number of tokens is chosen."""
    chosen = [place for place, datum in enumerate(case.data) if is_chosen(len(datum["logprobs"]))]
    assert chosen
    results = run(custom_losses, case, [case.data[place] for place in chosen])
    np.testing.assert_allclose(results.losses_D, case.losses[chosen], rtol=1e-5, atol=1e-5)
    for found, place in zip(results.metrics_DM, chosen, strict=True):
        np.testing.assert_allclose(found, list(case.metrics[place].values()), rtol=1e-5, atol=1e-5)
    for gradient, place in zip(results.gradients, chosen, strict=True):
        np.testing.assert_allclose(gradient, case.gradients[place], rtol=1e-5, atol=1e-5)


# --- what a loss may see ------------------------------------------------------------------------------


def node(target, *args, op="call_function", name="node", **kwargs):
    return {"op": op, "name": name, "target": target, "args": list(args), "kwargs": kwargs}


def ref(name):
    return {"ref": name}


def graph(*nodes, loss="loss", metrics=None, rank=1, others=()):
    inputs = [("logprobs", rank), *others]
    placeholders = [node(name, op="placeholder", name=name) for name, _ in inputs]
    output = {"tuple": [ref(loss), {"dict": {key: ref(each) for key, each in (metrics or {}).items()}}]}
    definition = {
        "name": "mine",
        "inputs": [{"name": name, "rank": rank} for name, rank in inputs],
        "graph": {"nodes": [*placeholders, *nodes, node("output", output, op="output", name="output")]},
    }
    return json.dumps(definition).encode()


def summing(*nodes):
    """The loss is the sum of the last node."""
    return graph(*nodes, node("torch.sum", ref(nodes[-1]["name"]), name="loss"))


def datums(*lengths):
    return [[-np.arange(1, length + 1, dtype=np.float32) / 8] for length in lengths]


ADDED = [
    node("torch.sum", ref("big"), name="sum"),
    node("operator.add", ref("logprobs"), ref("sum"), name="added"),
]
FILLING = [
    *(node("torch.exp", ref("big"), name=f"exp_{number}") for number in range(9)),
    node("operator.add", ref("added"), 1),
]


def problem(custom_losses, body, data):
    with pytest.raises(LossProblem) as refused:
        run_all(custom_losses, body, data)
    return str(refused.value)


def test_the_same_datums_give_the_same_bits_in_another_process(custom_losses):
    case = recorded()[LONGEST]
    data = [datum for datum in case.data if len(datum["logprobs"]) > SHORTEST_BUCKET]
    first, second = run(custom_losses, case, data), run(CustomLosses(), case, data)
    assert (first.losses_D == second.losses_D).all()
    for one, other in zip(first.gradients, second.gradients, strict=True):
        assert (one == other).all()


def test_padding_reaches_neither_loss_nor_gradient(custom_losses):
    """log(1 - exp(x)) is -inf, and its slope infinite, for the zeros behind a datum; a mean spreads it."""
    body = summing(
        node("torch.exp", ref("logprobs"), name="exp"),
        node("operator.sub", 1, ref("exp"), name="sub"),
        node("torch.log", ref("sub"), name="log"),
        node("torch.mean", ref("log"), name="mean"),
        node("operator.mul", ref("log"), ref("mean"), name="mul"),
        node("torch.cumsum", ref("mul"), 0, name="cumsum"),
    )
    results = run_all(custom_losses, body, datums(3, 31, 32))
    assert np.isfinite(results.losses_D).all()
    assert all(np.isfinite(gradient).all() for gradient in results.gradients)


def test_many_datums_of_many_lengths_share_few_programs():
    losses = CustomLosses()
    body = summing(node("torch.exp", ref("logprobs")))
    data = datums(*range(1, 65), *range(1, 33))
    results = run_all(losses, body, data)
    np.testing.assert_allclose(results.losses_D, [np.exp(each[0]).sum() for each in data], rtol=1e-6)
    for gradient, (logprobs,) in zip(results.gradients, data, strict=True):
        np.testing.assert_allclose(gradient, np.exp(logprobs), rtol=1e-6)
    assert losses._program.cache_info().currsize == 2


def test_programs_that_nobody_uses_are_forgotten(monkeypatch):
    monkeypatch.setattr(loss_runs, "MOST_PROGRAMS", 2)
    losses = CustomLosses()
    for factor in (1, 2, 3):
        run_all(losses, summing(node("operator.mul", ref("logprobs"), factor)), datums(2))
    assert losses._program.cache_info().currsize == losses._loss.cache_info().currsize == 2


@pytest.mark.parametrize(
    "nodes, expected",
    [
        ([node("operator.getitem", ref("logprobs"), {"slice": [None, None, 2]})], "not taken in steps"),
        ([node("operator.getitem", ref("logprobs"), {"slice": [-3, 2, None]})], "no fixed length"),
        (
            [
                node("operator.getitem", ref("logprobs"), {"slice": [1, None, None]}, name="later"),
                node("operator.add", ref("later"), ref("logprobs")),
            ],
            "the shapes [T-1] and [T] do not fit together",
        ),
        (
            [
                node("operator.gt", ref("logprobs"), -1, name="mask"),
                node("operator.getitem", ref("logprobs"), ref("mask")),
            ],
            "without a fixed shape",
        ),
        ([node("torch.sum", ref("logprobs"), 1)], "there is no dimension 1 among 1"),
        ([node("view", ref("logprobs"), 2, -1, op="call_method")], "-1 has no value"),
        (
            [node("torch.full", [1 << 13, 1 << 13], 1.0, name="big"), *ADDED],
            "has 67108864 elements per datum",
        ),
        ([node("torch.full", [1 << 50, 1 << 50], 1.0, name="big"), *ADDED], "node 'big'"),
        (
            [node("torch.full", [1 << 12, 1 << 12], 1.0, name="big"), *ADDED, *FILLING],
            "up to here, values have",
        ),
        (
            [node("operator.pow", 9, 2**50, name="big"), node("operator.add", ref("logprobs"), ref("big"))],
            "node 'big'",
        ),
        ([node("torch.diff", ref("logprobs"), 2**50)], "n must be 1 to 8"),
        ([node("torch.einsum", "i,i,i->i", *[ref("logprobs")] * 3)], "one or two tensors"),
        ([node("torch.matmul", ref("logprobs"), 1.0)], "takes tensor"),
        (
            [
                node("operator.floordiv", 1, 0, name="zero"),
                node("operator.add", ref("logprobs"), ref("zero")),
            ],
            "zero",
        ),
        ([node("torch.norm", ref("logprobs"))], "not among the operations"),
        ([node("norm", ref("logprobs"), 3, op="call_method")], "p is 3; it takes 1, 2 or inf"),
    ],
)
def test_a_loss_that_does_not_fit_its_shapes_says_where(custom_losses, nodes, expected):
    with pytest.raises((LossProblem, InvalidRequest)) as refused:
        run_all(custom_losses, summing(*nodes), datums(4))
    assert expected in str(refused.value)
    assert "node '" in str(refused.value)


def test_a_datum_that_is_too_short_is_named_with_what_the_loss_takes(custom_losses):
    body = summing(node("operator.getitem", ref("logprobs"), {"slice": [None, 5, None]}))
    assert run_all(custom_losses, body, datums(5, 9)).losses_D.shape == (2,)
    message = problem(custom_losses, body, datums(5, 4))
    assert "datum 1 has 4 tokens; node 'node' (operator.getitem) of loss 'mine' takes at least 5" in message


@pytest.mark.parametrize(
    "body, expected",
    [
        (graph(node("torch.exp", ref("logprobs"), name="loss")), "this is a tensor [T] of float32"),
        (graph(node("torch.argmax", ref("logprobs"), name="loss")), "this is a tensor [] of int64"),
        (graph(node("numel", ref("logprobs"), op="call_method", name="loss")), "this is no tensor"),
        (
            graph(node("torch.sum", ref("logprobs"), name="loss"), metrics={"custom/a:sum": "logprobs"}),
            "the metric custom/a:sum must be one number per datum",
        ),
    ],
)
def test_a_loss_and_its_metrics_are_numbers(custom_losses, body, expected):
    assert expected in problem(custom_losses, body, datums(3))


def test_datums_may_have_different_numbers_of_targets(custom_losses):
    body = graph(
        node("torch.logsumexp", ref("logprobs"), -1, name="node"),
        node("torch.sum", ref("node"), name="loss"),
        rank=2,
    )
    data = [[np.full((3, 2), -1, np.float32)], [np.full((5, 4), -1, np.float32)]]
    results = run_all(custom_losses, body, data)
    np.testing.assert_allclose(results.losses_D, [3 * (np.log(2) - 1), 5 * (np.log(4) - 1)], rtol=1e-6)
    assert [gradient.shape for gradient in results.gradients] == [(3, 2), (5, 4)]


WIDE = graph(
    node("torch.logsumexp", ref("logprobs"), -1, name="node"),
    node("torch.sum", ref("node"), name="loss"),
    rank=2,
)
PLENTY = {
    "operations_per_datum": 1e9,
    "operations": 1e9,
    "programs": 99,
    "compile_seconds": 9,
    "run_seconds": 9,
}


def refusal(custom_losses, body, data, **bound):
    with pytest.raises(LossProblem) as refused:
        custom_losses.open(body, data, LossLimits(**PLENTY | bound))
    return str(refused.value)


def test_a_request_is_compiled_into_so_many_programs_and_no_more(custom_losses):
    """Datums of one width are two programs: for one datum, and for up to four."""
    data = [[np.zeros((3, width), np.float32)] for width in (1, 2, 3, 3)]
    assert len(custom_losses.open(WIDE, data, LossLimits(**PLENTY | {"programs": 3})).pieces) == 3
    message = refusal(custom_losses, WIDE, data, programs=2)
    assert "loss 'mine' would be compiled 3 times" in message
    assert "At most 2 are allowed (the limit custom_loss_programs)" in message


def test_the_widths_of_a_request_are_counted_before_any_is_traced(custom_losses, monkeypatch):
    monkeypatch.setattr(loss_runs, "LossProgram", None)
    data = [[np.zeros((3, width), np.float32)] for width in range(1, 101)]
    assert "compiled 100 times" in refusal(custom_losses, WIDE, data)


PRODUCTS = graph(
    node("torch.unsqueeze", ref("logprobs"), 1, name="column"),
    node("torch.t", ref("column"), name="row"),
    node("torch.matmul", ref("column"), ref("row"), name="square"),
    node("torch.matmul", ref("square"), ref("square"), name="cube"),
    node("torch.sum", ref("cube"), name="loss"),
)


def test_products_of_matrices_are_counted_by_what_they_multiply(custom_losses):
    """[32, 32] times [32, 32], where datums have up to 32 tokens, are 2 x 32^3 operations; values are few."""
    program = custom_losses.open(PRODUCTS, datums(20)).pieces[0].program
    assert 2 * 32**3 < program.operations < 2 * 32**3 + 10_000
    operations = program.operations
    message = refusal(custom_losses, PRODUCTS, datums(20), operations_per_datum=operations - 1)
    assert f"datum 0: loss 'mine' takes {operations:,} operations for it" in message
    assert f"at most {operations - 1:,} are allowed (the limit custom_loss_datum_operations)" in message


def test_the_operations_of_all_datums_are_counted(custom_losses):
    operations = custom_losses.open(PRODUCTS, datums(20)).pieces[0].program.operations
    three = LossLimits(**PLENTY | {"operations": 3 * operations})
    assert custom_losses.open(PRODUCTS, datums(20, 21, 22), three)
    message = refusal(custom_losses, PRODUCTS, datums(20, 21, 22, 23), operations=3 * operations)
    assert f"takes {4 * operations:,} operations for these datums; at most {3 * operations:,}" in message


@pytest.mark.parametrize(
    "nodes",
    [
        [node("torch.sort", ref("logprobs"), name="both"), node("operator.getitem", ref("both"), 0)],
        [node("torch.cumsum", ref("logprobs"), 0)],
    ],
)
def test_sorts_and_cumulative_sums_count_for_more_than_their_elements(custom_losses, nodes):
    plain = custom_losses.open(summing(node("torch.exp", ref("logprobs"))), datums(20)).pieces[0].program
    program = custom_losses.open(summing(*nodes), datums(20)).pieces[0].program
    assert program.operations > plain.operations + 32 * 4


def test_what_jax_refuses_is_an_error_of_the_loss(custom_losses, monkeypatch):
    def broken(trace, x):
        raise TypeError("no such thing\nwith a long story")

    monkeypatch.setitem(interpret.FUNCTIONS, "erf", broken)
    message = problem(custom_losses, summing(node("torch.erf", ref("logprobs"))), datums(3))
    assert message == "node 'node' (torch.erf) of loss 'mine': no such thing"


def test_a_command_is_taken_apart_as_it_was_put_together():
    command = commands.CustomLoss(
        number=0,
        tenant="a",
        definition=graph(
            node("torch.sum", ref("logprobs"), name="loss"), rank=2, others=[("a", 1), ("s", 0)]
        ),
        lengths=np.array([2, 1], np.int32),
        widths=np.array([[2, 3], [0, 0], [0, 0]], np.int32),
        values=[np.arange(7, dtype=np.float32), np.arange(3), np.arange(2)],
    )
    first, second = inputs_of(command)
    assert first[0].tolist() == [[0, 1], [2, 3]]
    assert second[0].tolist() == [[4, 5, 6]]
    assert (first[1].tolist(), second[1].tolist()) == ([0, 1], [2])
    assert (first[2].tolist(), second[2].tolist()) == (0, 1)
