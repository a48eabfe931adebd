"""Custom losses as programs: interprets a graph in JAX, and compiles it for datums of one padded shape.

Dimension key: D datum, T token, K target of a position, M metric.
"""

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from spmd_tx.custom_loss import definition
from spmd_tx.custom_loss.arguments import DtypeName, Ref, printed, quoted
from spmd_tx.custom_loss.definition import CheckedLoss, Node
from spmd_tx.protocol import commands
from spmd_tx.worker.custom_loss import elementwise, numbers, products, reductions
from spmd_tx.worker.custom_loss import shapes as loss_shapes
from spmd_tx.worker.custom_loss.values import Dim, Length, LossProblem, Need, Tensor, Trace, shown

FUNCTIONS: dict[str, Callable[..., Any]] = (
    elementwise.FUNCTIONS
    | numbers.FUNCTIONS
    | products.FUNCTIONS
    | reductions.FUNCTIONS
    | loss_shapes.FUNCTIONS
)

MOST_DATUMS = 64  # per call of a program
MOST_WORK = 1 << 27  # elements of all values of all its datums

# What tracing raises when JAX refuses something that our checks let pass. Nothing is computed yet, so the
# loss fails, not the worker.
REFUSALS = (TypeError, ValueError, IndexError, KeyError, ArithmeticError, NotImplementedError, RecursionError)

Shapes = tuple[tuple[int, ...], ...]  # of the inputs of one datum, padded


class LossProgram:
    """Compiles and runs a loss for datums of one padded shape, for given numbers of datums."""

    def __init__(self, loss: CheckedLoss, bucket: int, shapes: Shapes, dtypes: tuple[str, ...]) -> None:
        """Raises LossProblem when the loss cannot be run on these shapes."""
        self._loss, self._bucket = loss, bucket
        self._inputs = [
            jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in zip(shapes, dtypes, strict=True)
        ]
        trace = self._trace(jax.ShapeDtypeStruct((), jnp.int64), self._inputs)
        self.needs: list[Need] = trace.needs
        self.operations = trace.operations  # of arithmetic, per datum
        self.datums = power_of_four(min(MOST_DATUMS, max(1, MOST_WORK // max(1, trace.work))))
        self._compiled: dict[int, Callable[..., Any]] = {}  # by the number of datums

    def is_compiled(self, datums: int) -> bool:
        return datums in self._compiled

    def compile(self, datums: int) -> None:
        differentiate = jax.value_and_grad(self._run, argnums=1, has_aux=True)
        tokens, logprobs, *others = (
            jax.ShapeDtypeStruct((datums, *each.shape), each.dtype)
            for each in (jax.ShapeDtypeStruct((), jnp.int64), *self._inputs)
        )
        lowered = jax.jit(jax.vmap(differentiate)).lower(tokens, logprobs, others)
        self._compiled[datums] = lowered.compile()

    def run(self, tokens_D: np.ndarray, logprobs: np.ndarray, others: Sequence[np.ndarray]) -> Any:
        """Return ((losses, metrics), gradients); compile first if needed."""
        if not self.is_compiled(len(tokens_D)):
            self.compile(len(tokens_D))
        return self._compiled[len(tokens_D)](tokens_D, logprobs, list(others))

    def _trace(self, tokens: Any, inputs: list[Any]) -> Trace:
        """Trace the graph without computing anything."""
        seen: list[Trace] = []

        def run(tokens: Array, inputs: list[Array]) -> Any:
            seen.append(Trace(tokens, self._bucket))
            return _interpret(self._loss, seen[0], inputs)

        try:
            jax.eval_shape(run, tokens, inputs)
        except REFUSALS as error:
            line = str(error).partition("\n")[0]
            raise LossProblem(f"{place_of(self._loss, seen[0].node)}: {printed(line, 500)}") from error
        except LossProblem as problem:
            raise LossProblem(f"{place_of(self._loss, seen[0].node)}: {problem}") from None
        return seen[0]

    def _run(self, tokens: Array, logprobs: Array, others: list[Array]) -> Any:
        return _interpret(self._loss, Trace(tokens, self._bucket), [logprobs, *others])


def inputs_of(command: commands.CustomLoss) -> list[list[np.ndarray]]:
    """Unpack the inputs of every datum, each [], [T] or [T, K]."""
    ranks = [each.rank for each in definition.decode(command.definition).inputs]
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


def _interpret(loss: CheckedLoss, trace: Trace, inputs: Sequence[Array]) -> tuple[Array, Array]:
    """Run the nodes in order; return the loss and the metrics [M]."""
    values: dict[str, Any] = {}
    for each, array in zip(loss.inputs, inputs, strict=True):
        shape: tuple[Dim, ...] = (Length(1, 0), *array.shape[1:]) if each.rank else ()
        values[each.name] = trace.tensor(array, shape)
    for node in loss.nodes:
        trace.node = node.name
        arguments = {name: _resolve(value, values) for name, value in node.arguments.items()}
        meaningful = {name: value for name, value in arguments.items() if name not in _without_meaning(node)}
        values[node.name] = FUNCTIONS[node.operation.name](trace, **meaningful)
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
    """Return the names of arguments that torch needs and we ignore."""
    return {
        each.name
        for each in node.operation.parameters
        if each.form == "nothing" or each.name == "_stacklevel"
    }


def _resolve(argument: Any, values: dict[str, Any]) -> Any:
    match argument:
        case Ref(name=name):
            return values[name]
        case DtypeName(name=name):
            return jnp.dtype(name)
        case slice():
            return slice(*(_resolve(each, values) for each in (argument.start, argument.stop, argument.step)))
        case tuple():
            return tuple(_resolve(each, values) for each in argument)
        case list():
            return [_resolve(each, values) for each in argument]
    return argument


def place_of(loss: CheckedLoss, node: str) -> str:
    target = next((each.target for each in loss.nodes if each.name == node), "input")
    return f"node {node!r} ({target}) of loss {quoted(loss.name)}"


def power_of_four(count: int) -> int:
    """Return the largest power of four that is at most ``count``."""
    return 1 << (count.bit_length() - 1) // 2 * 2
