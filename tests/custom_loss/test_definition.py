import json
import re
from pathlib import Path

import msgspec
import pytest

from spmd_tx.custom_loss import definition as custom_loss
from spmd_tx.custom_loss.definition import Definition
from spmd_tx.custom_loss.operations import GROUPS, OPERATIONS
from spmd_tx.errors import InvalidRequest
from tests.custom_loss.recorded import recorded

DOCS = Path(__file__).parents[2] / "docs" / "custom_losses.md"

LOGPROBS = {"op": "placeholder", "name": "logprobs", "target": "logprobs"}
TOTAL = {"op": "call_method", "name": "total", "target": "sum", "args": [{"ref": "logprobs"}]}


def returning(loss, metrics=()):
    output = {"tuple": [{"ref": loss}, {"dict": dict(metrics)}]}
    return {"op": "output", "name": "output", "target": "output", "args": [output]}


def definition(*nodes, inputs=({"name": "logprobs", "rank": 1},), name="loss", **graph):
    whole = {"name": name, "inputs": list(inputs), "graph": {"format": 1, "nodes": list(nodes)} | graph}
    return msgspec.convert(json.loads(json.dumps(whole)), Definition)


def call(target, *args, op="call_function", name="node", **kwargs):
    return {"op": op, "name": name, "target": target, "args": list(args), "kwargs": kwargs}


def refusal(*nodes, **changes):
    with pytest.raises(InvalidRequest) as refused:
        custom_loss.read(definition(*nodes, **changes))
    return str(refused.value)


def of(node):
    """A loss with one node of interest."""
    return LOGPROBS, TOTAL, node, returning("total")


@pytest.mark.parametrize("name", recorded())
def test_what_the_sdk_uploads_is_read(name):
    loss = custom_loss.read(msgspec.convert(recorded()[name].definition, Definition))
    assert loss.inputs[0].name == "logprobs"
    assert all(OPERATIONS[node.target] is node.operation for node in loss.nodes)


@pytest.mark.parametrize(
    "node, problem",
    [
        (
            call("torch.rand", 3),
            "node 'node' (call_function torch.rand): torch.rand is not among the operations",
        ),
        (call("torch.rand", 3), "a loss draws no random numbers"),
        (call("add_", {"ref": "logprobs"}, 1, op="call_method"), "use the form without the underscore"),
        (call("torch.masked_select", {"ref": "logprobs"}), "no fixed shape"),
        (call("torch._C._set_grad_enabled", False), "use detach()"),
        (call("os.system", "true"), "os.system is not among the operations"),
        (call("eval", "1"), "eval is not among the operations"),
        (
            call("getattr", {"ref": "logprobs"}, "__class__"),
            "getattr has name '__class__'; it takes text (shape",
        ),
        (call("weight", op="get_attr"), "a loss cannot capture tensors"),
        (call("linear", op="call_module"), "a loss cannot use torch.nn modules"),
        (call("output", op="output"), "no kind of node that a loss may have here"),
        (call("torch.exp", {"ref": "later"}), "it refers to 'later', which is no node before it"),
        (call("torch.exp", {"ref": "node"}), "it refers to 'node', which is no node before it"),
        (call("torch.exp"), "it lacks x; exp takes x"),
        (call("torch.exp", 1.0), "torch.exp has x 1.0; it takes tensor there"),
        (call("torch.exp", {"ref": "total"}, 2), "its arguments do not fit; exp takes x"),
        (call("torch.exp", {"ref": "total"}, out={"ref": "logprobs"}), "its arguments do not fit"),
        (call("torch.sum", {"ref": "logprobs"}, dim="0"), "torch.sum has dim '0'; it takes dims there"),
        (call("torch.sum", {"ref": "logprobs"}, input={"ref": "total"}), "its arguments do not fit"),
        (call("torch.clamp", {"ref": "logprobs"}, "0"), "torch.clamp has min '0'; it takes value there"),
        (call("torch.full", [2**60], 1), "the integer 1152921504606846976 is beyond"),
        (call("torch.zeros_like", {"ref": "total"}, dtype={"dtype": "complex64"}), "dtype 'complex64'"),
        (call("operator.getitem", {"ref": "total"}, {"code": "x"}), "it has an argument code 'x'"),
        (call("operator.getitem", {"ref": "total"}, {"a": 1, "b": 2}), "more than one key"),
        (call("torch.exp", [[[[[[[[[[1]]]]]]]]]]), "nested more than 8 deep"),
        (call("torch.stack", [{"ref": "total"}] * 100), "an argument has 100 elements; at most 64"),
        (call("torch.exp", {"ref": "total"}, name="total"), "there is another node of this name"),
        (
            call("torch.exp", {"ref": "total"}, name="a b"),
            "names of nodes are letters, digits and underscores",
        ),
        (
            call("torch.nn.functional.pad", {"ref": "logprobs"}, [1, 0], mode="reflect"),
            "it takes text (constant)",
        ),
    ],
)
def test_a_node_that_is_not_allowed_is_refused_by_its_name(node, problem):
    message = refusal(*of(node))
    assert problem in message
    assert "node '" in message
    assert "docs/custom_losses.md" in message


@pytest.mark.parametrize(
    "nodes, problem",
    [
        ([], "the graph has 0 nodes; it must have 1 to 256"),
        ([LOGPROBS, TOTAL], "the last node must be the output"),
        ([LOGPROBS, returning("nothing")], "it refers to 'nothing'"),
        (
            [LOGPROBS, {**returning("logprobs"), "args": [{"ref": "logprobs"}]}],
            "a loss returns (loss, metrics)",
        ),
        (
            [LOGPROBS, TOTAL, returning("total", {"loss:sum": {"ref": "total"}})],
            "must be called custom/<name>",
        ),
        (
            [LOGPROBS, TOTAL, returning("total", {"custom/x:max": {"ref": "total"}})],
            "must be called custom/<name>",
        ),
        ([LOGPROBS, TOTAL, returning("total", {"custom/x:sum": 1.0})], "the metric 'custom/x:sum' is 1.0"),
        ([call("torch.ones", [2], name="ones"), TOTAL, returning("total")], "it refers to 'logprobs'"),
        ([TOTAL | {"args": [], "op": "placeholder"}, returning("total")], "a placeholder is called like"),
        (
            [
                LOGPROBS,
                call("torch.ones", [2]),
                call("torch.sum", {"ref": "node"}, name="total"),
                returning("total"),
            ],
            "the loss 'total' does not depend on logprobs",
        ),
    ],
)
def test_a_graph_that_gives_no_loss_is_refused(nodes, problem):
    assert problem in refusal(*nodes)


@pytest.mark.parametrize(
    "changes, problem",
    [
        ({"inputs": []}, "the loss has 0 inputs"),
        ({"inputs": [{"name": "weights", "rank": 1}]}, "the first input must be logprobs"),
        ({"inputs": [{"name": "logprobs", "rank": 0}]}, "with rank 1 ([T]) or 2 ([T, K])"),
        (
            {"inputs": [{"name": "logprobs", "rank": 1}, {"name": "A", "rank": 1}]},
            "'A' must be a lowercase name",
        ),
        ({"inputs": [{"name": "logprobs", "rank": 1}] * 2}, "two inputs have one name"),
        (
            {"inputs": [{"name": "logprobs", "rank": 1}, {"name": "a", "rank": 1}]},
            "placeholders are logprobs",
        ),
        ({"name": ""}, "the loss's name has 0 characters"),
        ({"format": 2}, "the graph has format 2; this service reads format 1"),
    ],
)
def test_inputs_name_and_format_are_checked(changes, problem):
    assert problem in refusal(LOGPROBS, TOTAL, returning("total"), **changes)


def test_a_graph_with_too_many_nodes_is_refused():
    more = [call("torch.exp", {"ref": "logprobs"}, name=f"exp_{number}") for number in range(1000)]
    assert "1003 nodes" in refusal(LOGPROBS, TOTAL, *more, returning("total"))
    sums = [call("torch.sum", {"ref": "logprobs"}, name=f"sum_{number}") for number in range(64)]
    message = refusal(LOGPROBS, TOTAL, *sums, returning("total"))
    assert "node 'sum_63': the graph has 65 sums" in message


def test_long_names_of_others_do_not_fill_the_answer():
    assert len(refusal(*of(call("torch." + "x" * 10_000, name="y" * 10_000)))) < 1000


ODD = "a\0b\ud800c\u202ed\ne" + "f" * 100_000


@pytest.mark.parametrize(
    "nodes",
    [
        of(call("torch.exp", {"ref": "total"}, op=ODD)),
        of(call(ODD, {"ref": "total"})),
        of(call(ODD, {"ref": "total"}, op="call_method")),
        of(call("torch.exp", {"ref": "total"}, name=ODD)),
        of(call("torch.exp", {"ref": ODD})),
        of(call("torch.exp", {ODD: 1})),
        of(call("torch.exp", {"ref": "total"}, **{ODD: 1})),
        of(call("torch.sum", {"ref": "logprobs"}, dim=ODD)),
        of(call("getattr", {"ref": "logprobs"}, ODD)),
        of(call("torch.full", [10**4000], 1)),
        [LOGPROBS, TOTAL, returning("total", {ODD: {"ref": "total"}})],
        [LOGPROBS, TOTAL, returning("total", {"custom/x:sum": ODD})],
        [LOGPROBS, TOTAL, returning(ODD)],
    ],
)
def test_a_refusal_can_be_stored_and_shown_whatever_the_client_wrote(nodes):
    message = refusal(*nodes)
    assert message.isprintable()
    assert len(message) < 1000


def test_a_refused_input_is_named_so_that_the_message_can_be_stored():
    inputs = [{"name": "logprobs", "rank": 1}, {"name": ODD, "rank": 1}]
    assert refusal(LOGPROBS, TOTAL, returning("total"), inputs=inputs).isprintable()


def test_the_documentation_lists_every_operation():
    text = DOCS.read_text()
    for group, operations in GROUPS.items():
        section = re.search(rf"^### {re.escape(group)}\n(.*?)(?=^##|\Z)", text, re.MULTILINE | re.DOTALL)
        assert section is not None, group
        listed = set(re.findall(r"`([^`]+)`", section[1]))
        assert {target for each in operations for target in each.targets if "._C." not in target} <= listed
        assert listed <= set(OPERATIONS), group
