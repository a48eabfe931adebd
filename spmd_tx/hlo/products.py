"""How many floating-point operations the products of an instruction take: matrices, convolutions, attention.

A multiplication with its addition counts as two. What is done number by number is not counted.
"""

import math
import re

import numpy as np

from spmd_tx.hlo.module import Computation, HloModule, Instruction
from spmd_tx.hlo.traffic import estimate

CONTRACTED = re.compile(r"lhs_contracting_dims=\{([\d,]*)\}")
LABELS = re.compile(r"dim_labels=(\w+)_(\w+)->(\w+)")
WINDOW = re.compile(r"window=\{([^}]*)\}")
GROUPS = re.compile(r"(feature|batch)_group_count=(\d+)")
OF_LIBRARY = re.compile(r'lhs_contracting_dimensions"?:\s*\[([^\]]*)\]')
GEMMS = ("__cublas$gemm", "__cublas$lt$matmul", "__onednn$matmul", "__cublas$lt$matmul$f8")
CAUSAL = 0.5  # of the scores of an attention that looks only back


def flops(module: HloModule, computation: Computation, instruction: Instruction) -> float:
    """Return the operations of an instruction, with those of the computation that it fuses."""
    if instruction.does == "fusion":
        fused = module.called(instruction)
        return sum(flops(module, fused, each) for each in fused.instructions) if fused is not None else 0.0
    if instruction.does == "dot":
        return _of_dot(computation, instruction, CONTRACTED.search(instruction.attributes))
    if instruction.does == "convolution":
        return _of_convolution(computation, instruction)
    if instruction.does == "custom-call":
        return _of_custom_call(computation, instruction)
    return 0.0


def _of_custom_call(computation: Computation, instruction: Instruction) -> float:
    estimated = estimate(instruction)
    if estimated.get("flops"):
        return estimated["flops"]
    if instruction.target in GEMMS:
        return _of_dot(computation, instruction, OF_LIBRARY.search(instruction.attributes))
    if instruction.target.startswith("__cudnn$fmha"):
        return _of_attention(computation, instruction)
    return 0.0


def _of_dot(computation: Computation, dot: Instruction, contracted: re.Match[str] | None) -> float:
    left = next(computation.operands(dot), None)
    if left is None or not left.arrays or not dot.arrays:
        return 0.0
    dims = left.arrays[0].dims
    axes = [int(axis) for axis in re.findall(r"\d+", contracted[1])] if contracted else [len(dims) - 1]
    return 2.0 * dot.arrays[0].elements * math.prod(dims[axis] for axis in axes)


def _of_attention(computation: Computation, call: Instruction) -> float:
    """Count cuDNN's attention: two products of a query and a key each, five in the backward pass.

    Queries are [rows, tokens, heads, width]. Segments are not known, so whole rows count.
    """
    operands = [each.arrays[0].dims for each in computation.operands(call) if each.arrays]
    queries = [dims for dims in operands if len(dims) == 4]
    if len(queries) < 2:
        return 0.0
    (rows, tokens, heads, width), keys = queries[0], queries[1][1]
    share = CAUSAL if "CAUSAL" in call.attributes else 1.0
    products = 5 if "Backward" in call.target else 2
    return products * 2.0 * rows * heads * tokens * keys * width * share


def _of_convolution(computation: Computation, convolution: Instruction) -> float:
    """Count the pairs of a number and a weight that meet; TPUs run all products of matrices as convolutions.

    A batch dimension may be written as a dimension of the window, with padding and holes around it, so pairs
    with a padded number or a hole must not count.
    """
    labels = LABELS.search(convolution.attributes)
    operands = [each.arrays[0] for each in computation.operands(convolution) if each.arrays]
    if labels is None or len(operands) < 2:
        return 0.0
    left, right, result = (
        dict(zip(names, array.dims, strict=False))
        for names, array in zip(labels.groups(), (*operands[:2], convolution.arrays[0]), strict=True)
    )
    groups = {kind: int(count) for kind, count in GROUPS.findall(convolution.attributes)}
    total = 2.0 * left.get("b", 1) * left.get("f", 1) * right.get("o", 1)
    total /= groups.get("feature", 1) * groups.get("batch", 1)
    window = _window(convolution.attributes)
    for place, axis in enumerate(sorted(label for label in left if label.isdigit())):
        total *= _pairs(left[axis], right.get(axis, 1), result.get(axis, 1), window, place)
    return total


def _window(attributes: str) -> dict[str, list[str]]:
    """Return the settings of a window, one for each of its dimensions: size, stride, pad, dilations."""
    window = WINDOW.search(attributes)
    settings = (part.split("=", 1) for part in window[1].split() if "=" in part) if window else ()
    return {name: value.split("x") for name, value in settings}


def _pairs(inputs: int, kernel: int, outputs: int, window: dict[str, list[str]], place: int) -> int:
    """Count along one dimension the pairs of an output and a weight that meet a number of the input."""

    def setting(name: str, otherwise: int) -> int:
        return int(window[name][place]) if place < len(window.get(name, ())) else otherwise

    padding = window["pad"][place] if place < len(window.get("pad", ())) else "0_0"
    first = int(padding.split("_")[0])
    holes = setting("lhs_dilate", 1)
    at = np.arange(outputs)[:, None] * setting("stride", 1) - first
    at = at + np.arange(kernel)[None] * setting("rhs_dilate", 1)
    return int(np.count_nonzero((at >= 0) & (at <= (inputs - 1) * holes) & (at % holes == 0)))
