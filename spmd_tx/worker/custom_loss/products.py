"""Products of vectors and matrices, and einsum, in custom losses; padding adds nothing."""

import string
from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import jax.numpy as jnp
from jax import lax

from spmd_tx.custom_loss.arguments import quoted
from spmd_tx.worker.custom_loss.elementwise import cast
from spmd_tx.worker.custom_loss.values import Dim, LossProblem, Tensor, Trace, result_type

PRODUCTS_PER_ELEMENT = 64  # a multiplication in a product of matrices is this much cheaper than other work


def _einsum(trace: Trace, equation: str, operands: Sequence[Tensor]) -> Tensor:
    inputs, arrow, output = equation.replace(" ", "").partition("->")
    names = inputs.split(",")
    letters = [letter for name in names for letter in name]
    if len(operands) > 2:
        raise LossProblem("it takes one or two tensors")
    if not arrow:
        output = "".join(sorted(letter for letter in set(letters) if letters.count(letter) == 1))
    if (
        len(names) != len(operands)
        or not set(letters) <= set(string.ascii_letters)
        or not set(output) <= set(letters)
    ):
        raise LossProblem(
            f"the equation {quoted(equation)} does not fit {len(operands)} operands; it takes letters only"
        )
    sizes: dict[str, Dim] = {}
    for name, operand in zip(names, operands, strict=True):
        if len(name) != operand.ndim:
            raise LossProblem(
                f"{quoted(name)} in {quoted(equation)} stands for a tensor of {operand.ndim} dimensions"
            )
        for letter, size in zip(name, operand.shape, strict=True):
            if sizes.setdefault(letter, size) != size:
                raise LossProblem(
                    f"{quoted(letter)} in {quoted(equation)} is both {sizes[letter]} and {size}"
                )
    if len(set(output)) < len(output):
        raise LossProblem(f"{quoted(equation)} repeats a letter of its result")
    products = prod(trace.widths(list(sizes.values())))
    trace.spend(products // PRODUCTS_PER_ELEMENT, 2 * products)
    dtype = result_type(*operands)
    arrays = [trace.filled(cast(operand, dtype), 0) for operand in operands]
    array = jnp.einsum(f"{inputs}->{output}", *arrays, precision=lax.Precision.HIGHEST)
    return trace.tensor(array, tuple(sizes[letter] for letter in output))


_PRODUCTS = {(1, 1): "i,i->", (2, 1): "ij,j->i", (1, 2): "i,ij->j", (2, 2): "ij,jk->ik"}


def _matmul(trace: Trace, x: Tensor, other: Tensor) -> Tensor:
    equation = _PRODUCTS.get((x.ndim, other.ndim))
    if equation is None:
        raise LossProblem("it takes tensors of one or two dimensions; use torch.einsum for more")
    return _einsum(trace, equation, [x, other])


def _dot(trace: Trace, x: Tensor, other: Tensor) -> Tensor:
    if (x.ndim, other.ndim) != (1, 1):
        raise LossProblem("it takes two vectors")
    return _einsum(trace, "i,i->", [x, other])


FUNCTIONS: dict[str, Callable[..., Any]] = {"dot": _dot, "matmul": _matmul, "einsum": _einsum}
