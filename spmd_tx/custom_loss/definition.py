"""Reads a custom loss as its client uploads it, a torch.fx graph, into checked, typed nodes. No JAX here.

The coordinator uses it to refuse a graph when it is created, the workers to run it. A graph that was read
holds only the operations of operations.py, with arguments of their forms.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NoReturn

import msgspec

from spmd_tx.custom_loss.arguments import (
    BadArguments,
    DtypeName,
    Ref,
    bind,
    described,
    has_form,
    hint,
    printed,
    quoted,
    refs,
    shown,
)
from spmd_tx.custom_loss.operations import OPERATIONS, REDUCTIONS, LossOperation
from spmd_tx.errors import InvalidRequest

MAX_BYTES = 256 << 10  # of the JSON document
MAX_NAME = 128
MAX_NODES = 256
MAX_REDUCTIONS = 64  # sums and the like, which take long to compile
MAX_INPUTS = 16
MAX_METRICS = 64
MAX_LITERALS = 64  # in one argument
MAX_DEPTH = 8  # of lists and dicts in one argument
MAX_NUMBER = 2**53  # of an integer literal

DTYPES = ("bool", "int32", "int64", "float16", "bfloat16", "float32", "float64")

_METRIC = re.compile(r"custom/[a-z0-9_./-]{1,64}:(sum|mean)")
_INPUT = re.compile(r"[a-z_][a-z0-9_]{0,63}")
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,127}")


class LossInput(msgspec.Struct, frozen=True):
    """Names a tensor that the loss reads: ``logprobs``, or a key of loss_fn_inputs."""

    name: str
    rank: Literal[0, 1, 2]  # a number, [T] or [T, K]


class WireNode(msgspec.Struct, frozen=True):
    """Holds a node of torch.fx, as it is sent."""

    op: str
    name: str
    target: str
    args: list[Any] = []
    kwargs: dict[str, Any] = {}


class WireGraph(msgspec.Struct, frozen=True):
    """Holds a graph, as it is sent."""

    nodes: list[WireNode]
    format: int = 1


class Definition(msgspec.Struct, frozen=True):
    """Holds a whole custom loss, as it is sent."""

    name: str
    inputs: list[LossInput]
    graph: WireGraph


@dataclass(frozen=True)
class Node:
    """Holds one step: an operation and its arguments by name, without those that were left out."""

    name: str
    operation: LossOperation
    target: str
    arguments: Mapping[str, Any]


@dataclass(frozen=True)
class CheckedLoss:
    """Holds a checked graph, which may be run."""

    name: str
    inputs: tuple[LossInput, ...]  # logprobs first
    nodes: tuple[Node, ...]  # in the order of execution, without placeholders and output
    loss: str  # the node whose value is the loss
    metrics: tuple[tuple[str, str], ...]  # (name of the metric, node)

    @property
    def metric_names(self) -> tuple[str, ...]:
        return tuple(name for name, _ in self.metrics)


def read(definition: Definition) -> CheckedLoss:
    """Check a whole definition. Raises InvalidRequest, which names the node."""
    if not 1 <= len(definition.name) <= MAX_NAME:
        raise InvalidRequest(
            f"the loss's name has {len(definition.name)} characters; it must have 1 to {MAX_NAME}"
        )
    _check_inputs(definition.inputs)
    graph = definition.graph
    if graph.format != 1:
        raise InvalidRequest(f"the graph has format {graph.format}; this service reads format 1")
    if not 1 <= len(graph.nodes) <= MAX_NODES:
        raise InvalidRequest(f"the graph has {len(graph.nodes)} nodes; it must have 1 to {MAX_NODES}")
    return _Reader(definition).read()


def decode(body: bytes) -> Definition:
    """Read a stored definition."""
    return msgspec.json.decode(body, type=Definition)


class _Reader:
    """Reads the nodes once, from first to last."""

    def __init__(self, definition: Definition) -> None:
        self._definition = definition
        self._node_names: set[str] = set()  # names of the nodes so far
        self._follows: set[str] = {"logprobs"}  # names of nodes whose value depends on logprobs
        self._placeholders: list[str] = []
        self._nodes: list[Node] = []

    def read(self) -> CheckedLoss:
        *nodes, output = self._definition.graph.nodes
        for node in nodes:
            self._read_node(node)
        if output.op != "output":
            refuse(output, "the last node must be the output")
        names = [each.name for each in self._definition.inputs]
        if self._placeholders != names:
            placeholders = ", ".join(self._placeholders[: MAX_INPUTS + 1])
            raise InvalidRequest(
                f"the graph's placeholders are {placeholders}; they must be the inputs, in their order: "
                f"{', '.join(names)}"
            )
        reductions = [node for node in self._nodes if node.operation.name in REDUCTIONS]
        if len(reductions) > MAX_REDUCTIONS:
            raise InvalidRequest(
                f"node {reductions[MAX_REDUCTIONS].name!r}: the graph has {len(reductions)} sums, "
                f"softmaxes, sorts and the like; at most {MAX_REDUCTIONS} are allowed"
            )
        loss, metrics = self._read_output(output)
        definition = self._definition
        return CheckedLoss(definition.name, tuple(definition.inputs), tuple(self._nodes), loss, metrics)

    def _read_node(self, node: WireNode) -> None:
        if not _NAME.fullmatch(node.name):
            refuse(node, "names of nodes are letters, digits and underscores")
        if node.name in self._node_names:
            refuse(node, "there is another node of this name")
        match node.op:
            case "placeholder":
                if node.target != node.name or node.args or node.kwargs:
                    refuse(
                        node,
                        "a placeholder is called like the input that it stands for, and has no arguments",
                    )
                self._placeholders.append(node.target)
            case "call_function" | "call_method":
                self._nodes.append(self._read_call(node))
            case "get_attr":
                refuse(node, "a loss cannot capture tensors; send them as loss_fn_inputs")
            case "call_module":
                refuse(node, "a loss cannot use torch.nn modules; use functions of torch.nn.functional")
            case _:
                refuse(node, f"{quoted(node.op)} is no kind of node that a loss may have here")
        self._node_names.add(node.name)

    def _read_call(self, node: WireNode) -> Node:
        target = node.target if node.op == "call_function" else f".{node.target}"
        operation = OPERATIONS.get(target)
        if operation is None:
            refuse(node, f"{shown(target)} is not among the operations of custom losses{hint(target)}")
        positional = [self._read_value(node, value) for value in node.args]
        named = {key: self._read_value(node, value) for key, value in node.kwargs.items()}
        try:
            arguments = bind(operation, positional, named)
        except BadArguments as problem:
            refuse(node, str(problem))
        for parameter in operation.parameters:
            if parameter.name in arguments and not has_form(arguments[parameter.name], parameter):
                words = f" ({', '.join(parameter.words)})" if parameter.words else ""
                refuse(
                    node,
                    f"{shown(target)} has {parameter.name} {described(arguments[parameter.name])}; "
                    f"it takes {parameter.form}{words} there",
                )
        if any(self._follows.intersection(refs(value)) for value in arguments.values()):
            self._follows.add(node.name)
        return Node(node.name, operation, target, arguments)

    def _read_value(self, node: WireNode, value: Any, depth: int = 0) -> Any:
        """Turn the JSON form into Ref, DtypeName, slice, tuple, list, dict and plain values."""
        if depth > MAX_DEPTH:
            refuse(node, f"an argument is nested more than {MAX_DEPTH} deep")
        if value is None or isinstance(value, bool | float | str):
            return value
        if isinstance(value, int):
            if abs(value) > MAX_NUMBER:
                refuse(
                    node,
                    f"the integer {printed(str(value), 40)} is beyond what a loss may hold, {MAX_NUMBER}",
                )
            return value
        if isinstance(value, list):
            return self._read_items(node, value, depth)
        if not isinstance(value, dict) or len(value) != 1:
            refuse(node, "an argument is an object with more than one key")
        ((kind, content),) = value.items()
        return self._read_special(node, kind, content, depth)

    def _read_special(self, node: WireNode, kind: str, content: Any, depth: int) -> Any:
        match kind, content:
            case "ref", str():
                if content not in self._node_names:
                    refuse(node, f"it refers to {quoted(content)}, which is no node before it")
                return Ref(content)
            case "float", "inf" | "-inf" | "nan":
                return float(content)
            case "tuple", list():
                return tuple(self._read_items(node, content, depth))
            case "slice", [_, _, _]:
                return slice(*self._read_items(node, content, depth))
            case "dict", dict():
                return {key: self._read_value(node, each, depth + 1) for key, each in content.items()}
            case "ellipsis", _:
                return ...
            case "dtype", str() if content in DTYPES:
                return DtypeName(content)
            case "device" | "layout" | "memory_format", str():
                return None  # there is one device, and one layout
        refuse(node, f"it has an argument {printed(kind)} {described(content)}, which a loss cannot have")

    def _read_items(self, node: WireNode, items: Sequence[Any], depth: int) -> list[Any]:
        if len(items) > MAX_LITERALS:
            refuse(node, f"an argument has {len(items)} elements; at most {MAX_LITERALS} are allowed")
        return [self._read_value(node, each, depth + 1) for each in items]

    def _read_output(self, node: WireNode) -> tuple[str, tuple[tuple[str, str], ...]]:
        output = self._read_value(node, node.args[0]) if len(node.args) == 1 else None
        match output:
            case [Ref(name=loss), dict(metrics)]:
                pass
            case _:
                refuse(node, "a loss returns (loss, metrics): a tensor, and a dict of tensors")
        if len(metrics) > MAX_METRICS:
            refuse(node, f"it has {len(metrics)} metrics; at most {MAX_METRICS} are allowed")
        for name, value in metrics.items():
            if not _METRIC.fullmatch(name):
                refuse(
                    node, f"the metric {quoted(name)} must be called custom/<name>:sum or custom/<name>:mean"
                )
            if not isinstance(value, Ref):
                refuse(node, f"the metric {quoted(name)} is {described(value)}; it must be a tensor")
        if loss not in self._follows:
            refuse(
                node,
                f"the loss {quoted(loss)} does not depend on logprobs, so there is nothing to learn from it",
            )
        return loss, tuple((name, value.name) for name, value in metrics.items())


def refuse(node: WireNode, problem: str) -> NoReturn:
    raise InvalidRequest(
        f"node {quoted(node.name)} ({printed(node.op, 20)} {printed(node.target)}): {problem}. "
        "docs/custom_losses.md lists what a loss may do"
    )


def _check_inputs(inputs: Sequence[LossInput]) -> None:
    if not 1 <= len(inputs) <= MAX_INPUTS:
        raise InvalidRequest(f"the loss has {len(inputs)} inputs; it must have 1 to {MAX_INPUTS}")
    for each in inputs:
        if not _INPUT.fullmatch(each.name):
            raise InvalidRequest(
                f"the input {quoted(each.name)} must be a lowercase name of letters, digits and underscores"
            )
    names = [each.name for each in inputs]
    if names[0] != "logprobs" or inputs[0].rank == 0:
        raise InvalidRequest("the first input must be logprobs, with rank 1 ([T]) or 2 ([T, K])")
    if len(set(names)) < len(names):
        raise InvalidRequest(f"two inputs have one name: {', '.join(names)}")
