"""Runs custom losses: graphs become programs, compiled once per shape, and datums go through in groups.

Losses run on the host's processor: there they take nothing of the memory that was measured for the model, and
what they compute is little. Dimension key: D datum, I input, T token, K target of a position, M metric.
"""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from spmd_tx import custom_loss, protocol
from spmd_tx.custom_loss import CustomLoss, Node
from spmd_tx.custom_loss_arguments import Dtype, Ref, printed, quoted
from spmd_tx.worker import loss_elementwise, loss_numbers, loss_reductions, loss_shapes
from spmd_tx.worker.loss_values import Dim, Length, LossProblem, Need, Tensor, Trace, shown

FUNCTIONS: dict[str, Callable[..., Any]] = (
    loss_elementwise.FUNCTIONS | loss_numbers.FUNCTIONS | loss_reductions.FUNCTIONS | loss_shapes.FUNCTIONS
)

SHORTEST_BUCKET = 32  # tokens
MOST_DATUMS = 64  # of one call of a program
MOST_WORK = 1 << 27  # elements of all values of all its datums
MOST_PROGRAMS = 64  # that are kept; the ones used last

# What tracing raises when JAX refuses what no check of ours has caught. Nothing is computed yet, so it is the
# loss that fails, not the worker.
REFUSALS = (TypeError, ValueError, IndexError, KeyError, ArithmeticError, NotImplementedError, RecursionError)

Shapes = tuple[tuple[int, ...], ...]  # of the inputs of one datum, padded


@dataclass(frozen=True)
class LossResults:
    """What a loss gave for each datum."""

    losses_D: np.ndarray  # float64
    metrics_DM: np.ndarray  # float64
    gradients: list[np.ndarray]  # of the loss with respect to logprobs, float32, in their shape


class Program:
    """A loss for datums of one padded shape."""

    def __init__(self, loss: CustomLoss, bucket: int, shapes: Shapes, dtypes: tuple[str, ...]) -> None:
        """Raises LossProblem when the loss cannot be run on these shapes."""
        self._loss, self._bucket = loss, bucket
        inputs = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in zip(shapes, dtypes, strict=True)]
        tokens = jax.ShapeDtypeStruct((), jnp.int64)
        trace = self._trace(tokens, inputs)
        self.needs: list[Need] = trace.needs
        self.datums = power_of_four(min(MOST_DATUMS, max(1, MOST_WORK // max(1, trace.work))))
        differentiate = jax.value_and_grad(self._run, argnums=1, has_aux=True)
        self.run = jax.jit(jax.vmap(differentiate))

    def _trace(self, tokens: Any, inputs: list[Any]) -> Trace:
        """Go through the graph without computing anything."""
        seen: list[Trace] = []

        def run(tokens: Array, inputs: list[Array]) -> Any:
            seen.append(Trace(tokens, self._bucket))
            return _interpret(self._loss, seen[0], inputs)

        try:
            jax.eval_shape(run, tokens, inputs)
        except REFUSALS as error:
            line = str(error).partition("\n")[0]
            raise LossProblem(f"{_place(self._loss, seen[0].node)}: {printed(line, 500)}") from error
        except LossProblem as problem:
            raise LossProblem(f"{_place(self._loss, seen[0].node)}: {problem}") from None
        return seen[0]

    def _run(self, tokens: Array, logprobs: Array, others: list[Array]) -> Any:
        return _interpret(self._loss, Trace(tokens, self._bucket), [logprobs, *others])


class CustomLosses:
    """The programs of one worker. Runs on the host's processor, with torch's 64-bit types."""

    def __init__(self) -> None:
        self._losses: OrderedDict[bytes, CustomLoss] = OrderedDict()
        self._programs: OrderedDict[tuple[object, ...], Program] = OrderedDict()
        self._device = jax.local_devices(backend="cpu")[0]

    def programs(self, graph: bytes, inputs: Sequence[Sequence[np.ndarray]]) -> list[str]:
        """What this runs, for people: which loss, for how many tokens."""
        return [_digest(graph).hex()[:8], *sorted({str(bucket) for bucket, *_ in _groups(inputs)})]

    def run(self, graph: bytes, inputs: Sequence[Sequence[np.ndarray]]) -> LossResults:
        """The loss of each datum. ``inputs`` are per datum, logprobs first, [], [T] or [T, K].

        Raises LossProblem when the loss cannot be run on them.
        """
        with jax.enable_x64(True), jax.default_device(self._device):
            loss, digest = self._loss(graph)
            results = LossResults(
                losses_D=np.zeros(len(inputs)),
                metrics_DM=np.zeros((len(inputs), len(loss.metrics))),
                gradients=[np.zeros(0)] * len(inputs),
            )
            for key, datums in _groups(inputs).items():
                program = self._program(loss, (digest, *key))
                _check_needs(loss, program.needs, {datum: inputs[datum][0].shape[0] for datum in datums})
                for start in range(0, len(datums), program.datums):
                    _run_group(program, key[0], inputs, datums[start : start + program.datums], results)
            return results

    def _loss(self, graph: bytes) -> tuple[CustomLoss, bytes]:
        digest = _digest(graph)
        if digest not in self._losses:
            self._losses[digest] = custom_loss.read(custom_loss.decode(graph))
        self._losses.move_to_end(digest)
        _forget_oldest(self._losses)
        return self._losses[digest], digest

    def _program(self, loss: CustomLoss, key: tuple[Any, ...]) -> Program:
        _, bucket, shapes, dtypes = key
        if key not in self._programs:
            self._programs[key] = Program(loss, bucket, shapes, dtypes)
        self._programs.move_to_end(key)
        _forget_oldest(self._programs)
        return self._programs[key]


def inputs_of(command: protocol.CustomLoss) -> list[list[np.ndarray]]:
    """Per datum and input: [], [T] or [T, K]."""
    ranks = [each.rank for each in custom_loss.decode(command.definition).inputs]
    columns = []
    for rank, widths_D, values in zip(ranks, command.widths, command.values, strict=True):
        shapes = [
            _shape(rank, *each) for each in zip(command.lengths.tolist(), widths_D.tolist(), strict=True)
        ]
        pieces = np.split(values, np.cumsum([prod(shape) for shape in shapes])[:-1])
        columns.append([piece.reshape(shape) for piece, shape in zip(pieces, shapes, strict=True)])
    return [list(datum) for datum in zip(*columns, strict=True)]


def _shape(rank: int, length: int, width: int) -> tuple[int, ...]:
    return ((), (length,), (length, width))[rank]


def _interpret(loss: CustomLoss, trace: Trace, inputs: Sequence[Array]) -> tuple[Array, Array]:
    """Run the nodes in their order: the loss, and the metrics [M]."""
    values: dict[str, Any] = {}
    for each, array in zip(loss.inputs, inputs, strict=True):
        shape: tuple[Dim, ...] = (Length(1, 0), *array.shape[1:]) if each.rank else ()
        values[each.name] = trace.tensor(array, shape)
    for node in loss.nodes:
        trace.node = node.name
        arguments = {name: _resolve(value, values) for name, value in node.arguments.items()}
        given = {name: value for name, value in arguments.items() if name not in _without_meaning(node)}
        values[node.name] = FUNCTIONS[node.operation.name](trace, **given)
    trace.node = loss.loss
    result = values[loss.loss]
    if not isinstance(result, Tensor) or result.shape or not result.is_floating:
        kind = (
            f"a tensor {shown(result.shape)} of {result.dtype}" if isinstance(result, Tensor) else "no tensor"
        )
        raise LossProblem(f"the loss must be one floating-point number per datum; this is {kind}")
    metrics = [_metric(trace, name, node, values[node]) for name, node in loss.metrics]
    stacked = jnp.stack(metrics) if metrics else jnp.zeros(0, jnp.float64)
    return result.array, jax.lax.stop_gradient(stacked)


def _metric(trace: Trace, name: str, node: str, value: Any) -> Array:
    trace.node = node
    tensor = trace.as_tensor(value) if not isinstance(value, tuple) and value is not None else None
    if tensor is None or any(dim != 1 for dim in tensor.shape):
        raise LossProblem(f"the metric {name} must be one number per datum")
    return tensor.array.reshape(()).astype(jnp.float64)


def _without_meaning(node: Node) -> set[str]:
    """Arguments that are there for torch's own reasons."""
    return {
        each.name
        for each in node.operation.parameters
        if each.form == "nothing" or each.name == "_stacklevel"
    }


def _resolve(argument: Any, values: dict[str, Any]) -> Any:
    match argument:
        case Ref(name=name):
            return values[name]
        case Dtype(name=name):
            return jnp.dtype(name)
        case slice():
            return slice(*(_resolve(each, values) for each in (argument.start, argument.stop, argument.step)))
        case tuple():
            return tuple(_resolve(each, values) for each in argument)
        case list():
            return [_resolve(each, values) for each in argument]
    return argument


def _groups(inputs: Sequence[Sequence[np.ndarray]]) -> dict[tuple[Any, ...], list[int]]:
    """Datums that go through one program: (bucket, padded shapes, types) to their numbers, in order."""
    groups: dict[tuple[Any, ...], list[int]] = {}
    for datum, arrays in enumerate(inputs):
        bucket = SHORTEST_BUCKET
        while bucket < arrays[0].shape[0]:
            bucket *= 2
        shapes = tuple((bucket, *array.shape[1:]) if array.ndim else () for array in arrays)
        groups.setdefault((bucket, shapes, tuple(str(array.dtype) for array in arrays)), []).append(datum)
    return groups


def _run_group(
    program: Program,
    bucket: int,
    inputs: Sequence[Sequence[np.ndarray]],
    datums: Sequence[int],
    results: LossResults,
) -> None:
    """Run a program once; missing datums are repetitions of the first."""
    count = 1
    while count < len(datums):
        count *= 4
    chosen = [*datums, *[datums[0]] * (min(count, program.datums) - len(datums))]
    tokens_D = np.array([inputs[datum][0].shape[0] for datum in chosen], np.int64)
    stacked = [
        np.stack([_padded(inputs[datum][place], bucket) for datum in chosen])
        for place in range(len(inputs[0]))
    ]
    (losses, metrics), gradients = program.run(tokens_D, stacked[0], stacked[1:])
    losses, metrics, gradients = (np.asarray(each) for each in (losses, metrics, gradients))
    for place, datum in enumerate(datums):
        results.losses_D[datum] = losses[place]
        results.metrics_DM[datum] = metrics[place]
        results.gradients[datum] = gradients[place, : tokens_D[place]].astype(np.float32)


def _padded(array: np.ndarray, bucket: int) -> np.ndarray:
    if not array.ndim:
        return array
    return np.pad(array, [(0, bucket - array.shape[0]), *[(0, 0)] * (array.ndim - 1)])


def _check_needs(loss: CustomLoss, needs: Sequence[Need], tokens: dict[int, int]) -> None:
    for need in needs:
        for datum, count in tokens.items():
            if count < need.tokens:
                raise LossProblem(
                    f"datum {datum} has {count} tokens; "
                    f"{_place(loss, need.node)} takes at least {need.tokens}"
                )


def _place(loss: CustomLoss, node: str) -> str:
    target = next((each.target for each in loss.nodes if each.name == node), "input")
    return f"node {node!r} ({target}) of loss {quoted(loss.name)}"


def _digest(graph: bytes) -> bytes:
    return blake2b(graph, digest_size=16).digest()


def _forget_oldest(cache: OrderedDict[Any, Any]) -> None:
    while len(cache) > MOST_PROGRAMS:
        cache.popitem(last=False)


def power_of_four(count: int) -> int:
    """The largest power of four that is not more."""
    size = 1
    while 4 * size <= count:
        size *= 4
    return size
