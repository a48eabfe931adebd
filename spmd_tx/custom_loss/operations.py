"""The operations that a custom loss may use, with their arguments; all others are refused at its creation.

Targets have the names that torch.fx records: `torch.exp`, `operator.mul`, and `.exp` for a method.
Argument forms: tensor (a node), value (a node or a number), number and int (a literal, or a node: a length),
bool, text (one of the words), dims (an int, a list of ints or null), dtype, index, tensors (a list), sizes
(ints, one by one or as a list), nothing (null or false; torch has the argument, and losses do not use it).
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class OperationParameter:
    """Describes one argument of an operation."""

    name: str
    form: str
    is_required: bool
    words: tuple[str, ...] = ()  # of a text


@dataclass(frozen=True)
class LossOperation:
    """Describes one operation, with all its names in torch."""

    name: str
    parameters: tuple[OperationParameter, ...]
    targets: tuple[str, ...]
    note: str = ""  # for the documentation

    @property
    def takes_sizes(self) -> bool:
        """Whether the remaining positional arguments form one tuple, as in x.view(2, 3)."""
        return any(parameter.form == "sizes" for parameter in self.parameters)


def _parameter(text: str) -> OperationParameter:
    """Parse ``x``, ``dim:dims`` or ``keepdim:bool?``; a question mark makes the argument optional."""
    name, _, form = text.partition(":")
    form, is_optional = form.removesuffix("?"), form.endswith("?")
    form, _, words = (form or "tensor").partition("=")
    return OperationParameter(name, form, not is_optional, tuple(words.split("|")) if words else ())


# The targets of an operation, in which {} is its name. Some versions of torch record private ones.
FUNCTION, METHOD = "torch.{}", ".{}"
FUNCTIONAL, PRIVATE = "torch.nn.functional.{}", "torch._C._nn.{}"
SPECIAL = ("torch.special.{}", "torch._C._special.special_{}")


def _targets(name: str, *targets: str) -> tuple[str, ...]:
    return tuple(target.format(name) for target in targets)


def _only(name: str, signature: str, *targets: str, note: str = "") -> LossOperation:
    """Describe an operation that torch has under these targets alone."""
    return LossOperation(name, tuple(map(_parameter, signature.split())), _targets(name, *targets), note)


def _operation(name: str, signature: str, *more: str, note: str = "") -> LossOperation:
    """Describe an operation of which torch has a function and a method."""
    return _only(name, signature, FUNCTION, METHOD, *more, note=note)


_ELEMENTWISE = [
    *(
        _operation(name, "x")
        for name in (
            "acos asin asinh atan ceil cos cosh erf exp2 floor isfinite isinf isnan log10 log2 logical_not "
            "reciprocal round rsqrt sign sin sinh sqrt square tan trunc"
        ).split()
    ),
    _operation("abs", "x", "torch.absolute", ".absolute", "operator.abs"),
    _operation("neg", "x", "torch.negative", ".negative", "operator.neg"),
    _operation("positive", "x", "operator.pos"),
    _operation("bitwise_not", "x", "operator.invert"),
    _operation("exp", "x"),
    _operation("expm1", "x", *SPECIAL),
    _operation("log", "x"),
    _operation("log1p", "x", *SPECIAL),
    _operation("sigmoid", "x", FUNCTIONAL, "torch.special.expit", "torch._C._special.special_expit"),
    _operation("tanh", "x", FUNCTIONAL),
    _operation("relu", "x inplace:nothing?", FUNCTIONAL, PRIVATE),
    _only("silu", "x inplace:nothing?", FUNCTIONAL, PRIVATE),
    _only("elu", "x alpha:number? inplace:nothing?", FUNCTIONAL, PRIVATE),
    _only("leaky_relu", "x negative_slope:number? inplace:nothing?", FUNCTIONAL, PRIVATE),
    _only("gelu", "x approximate:text=none|tanh?", FUNCTIONAL, PRIVATE),
    _only("logsigmoid", "x", FUNCTIONAL, "torch._C._nn.log_sigmoid"),
    _only("softplus", "x beta:number? threshold:number?", FUNCTIONAL, PRIVATE),
    _operation("logit", "x eps:number?", *SPECIAL),
    _operation("add", "x:value other:value alpha:number?", "operator.add"),
    _operation("sub", "x:value other:value alpha:number?", "operator.sub", "torch.subtract", ".subtract"),
    _operation("rsub", "x:value other:value alpha:number?"),
    _operation("mul", "x:value other:value", "operator.mul", "torch.multiply", ".multiply"),
    _operation(
        "div",
        "x:value other:value rounding_mode:text=trunc|floor?",
        "operator.truediv",
        "torch.divide",
        ".divide",
        "torch.true_divide",
        ".true_divide",
    ),
    _operation("floor_divide", "x:value other:value", "operator.floordiv"),
    _operation("remainder", "x:value other:value", "operator.mod"),
    _operation("pow", "x:value exponent:value", "operator.pow", "math.pow"),
    *(_operation(name, "x:value other:value", f"operator.{name}") for name in "eq ne lt le gt ge".split()),
    *(
        _operation(f"bitwise_{name}", "x:value other:value", f"operator.{target}")
        for name, target in (("and", "and_"), ("or", "or_"), ("xor", "xor"))
    ),
    *(
        _operation(name, "x other")
        for name in "logical_and logical_or logical_xor maximum minimum fmax fmin atan2 logaddexp".split()
    ),
    _operation("xlogy", "x:value other:value", *SPECIAL),
    _operation("clamp", "x min:value? max:value?", "torch.clip", ".clip"),
    _operation("clamp_min", "x min:value"),
    _operation("clamp_max", "x max:value"),
    _only("where", "condition x:value other:value", FUNCTION),
    _only("where_method", "x condition other:value", ".where"),
    _operation("masked_fill", "x mask value:value"),
    _operation("lerp", "x end weight:value"),
    _operation("nan_to_num", "x nan:number? posinf:number? neginf:number?"),
    _operation("detach", "x"),
    _operation("clone", "x memory_format:nothing?"),
    _only("contiguous", "x", METHOD),
]

_REDUCTION = "x dim:dims? keepdim:bool?"

_REDUCTIONS = [
    _operation("sum", _REDUCTION + " dtype:dtype?"),
    _operation("mean", _REDUCTION + " dtype:dtype?"),
    _operation("prod", "x dim:dims? keepdim:bool?"),
    _operation("amax", _REDUCTION),
    _operation("amin", _REDUCTION),
    *(
        _operation(
            name, "x dim:value? keepdim:bool?", note="of all elements, along one dimension, or of two tensors"
        )
        for name in ("max", "min")
    ),
    _operation("argmax", "x dim:int? keepdim:bool?"),
    _operation("argmin", "x dim:int? keepdim:bool?"),
    _operation("any", _REDUCTION),
    _operation("all", _REDUCTION),
    _operation("count_nonzero", "x dim:dims?"),
    _operation("logsumexp", "x dim:dims keepdim:bool?", *SPECIAL),
    _operation("var", "x dim:dims? unbiased:bool? keepdim:bool? correction:number?"),
    _operation("std", "x dim:dims? unbiased:bool? keepdim:bool? correction:number?"),
    _only(
        "norm",
        "x p:number? dim:dims? keepdim:bool? dtype:dtype?",
        METHOD,
        "torch.linalg.vector_norm",
        "torch._C._linalg.linalg_vector_norm",
        note="p is 1, 2 or inf",
    ),
    *(
        operation
        for name in ("softmax", "log_softmax")
        for operation in (
            _only(name, "x dim:int? _stacklevel:int? dtype:dtype?", FUNCTIONAL),
            _only(f"{name}_function", "x dim:int dtype:dtype?", *_targets(name, FUNCTION, METHOD, *SPECIAL)),
        )
    ),
    _operation("cumsum", "x dim:int dtype:dtype?"),
    _operation("cumprod", "x dim:int dtype:dtype?"),
    _operation("dot", "x other", "torch.inner", ".inner", note="of vectors"),
    _operation(
        "matmul",
        "x other",
        "operator.matmul",
        "torch.mv",
        ".mv",
        "torch.mm",
        ".mm",
        note="up to two dimensions",
    ),
    _only("einsum", "equation:text operands:tensors", "torch.functional.einsum", FUNCTION),
]

_SHAPES = [
    _only(
        "getattr",
        "x name:text=shape|ndim|dtype|device|T|values|indices",
        "getattr",
        note="x.shape, x.ndim, x.T",
    ),
    _only("size", "x dim:int?", METHOD),
    _operation("numel", "x", note="counts the datum's own tokens"),
    _only("dim", "x", METHOD, ".ndimension"),
    _only(
        "getitem", "x:value index:index", "operator.getitem", note="no tensors of bool, no steps over tokens"
    ),
    _operation("unsqueeze", "x dim:int"),
    _operation("squeeze", "x dim:dims?"),
    _operation("reshape", "x shape:sizes", ".view", note="the token dimension stays the first"),
    _operation("flatten", "x start_dim:int? end_dim:int?"),
    _operation("transpose", "x dim0:int dim1:int", "torch.swapaxes", ".swapaxes"),
    _operation("t", "x"),
    _operation("permute", "x dims:sizes"),
    _only("expand", "x size:sizes", METHOD),
    _only("expand_as", "x other", METHOD),
    _only("view_as", "x other", METHOD, ".reshape_as"),
    _only("cat", "tensors:tensors dim:int?", FUNCTION, "torch.concat", "torch.concatenate"),
    _only("stack", "tensors:tensors dim:int?", FUNCTION),
    _only("pad", "x pad:sizes mode:text=constant? value:number?", FUNCTIONAL, note="the last dimension"),
    _operation("flip", "x dims:sizes"),
    _operation("diff", "x n:int? dim:int?"),
    _operation("gather", "x dim:int index sparse_grad:nothing?"),
    _operation("take_along_dim", "x indices dim:int"),
    _operation("sort", "x dim:int? descending:bool? stable:bool?"),
    _operation("topk", "x k:int dim:int? largest:bool? sorted:bool?"),
    _only("zeros_like", "x dtype:dtype? device:nothing?", FUNCTION),
    _only("ones_like", "x dtype:dtype? device:nothing?", FUNCTION),
    _only("full_like", "x value:value dtype:dtype? device:nothing?", FUNCTION),
    _only("new_zeros", "x size:sizes dtype:dtype? device:nothing?", METHOD),
    _only("new_ones", "x size:sizes dtype:dtype? device:nothing?", METHOD),
    _only("new_full", "x size:dims value:value dtype:dtype? device:nothing?", METHOD),
    _only("zeros", "size:sizes dtype:dtype? device:nothing?", FUNCTION),
    _only("ones", "size:sizes dtype:dtype? device:nothing?", FUNCTION),
    _only("full", "size:dims value:value dtype:dtype? device:nothing?", FUNCTION),
    _only("arange", "start:int end:int? step:int? dtype:dtype? device:nothing?", FUNCTION),
    _only("to", "x target:value? dtype:dtype? device:nothing?", METHOD),
    _only("type_as", "x other", METHOD),
    *(_only(name, "x", f".{name}") for name in "float double long int bool half bfloat16".split()),
    _only("cpu", "x", METHOD),
]

_FUNCTIONAL_ENDS = " size_average:nothing? reduce:nothing? reduction:text=none|mean|sum|batchmean?"

_LOSSES = [
    _only("kl_div", "input target" + _FUNCTIONAL_ENDS + " log_target:bool?", FUNCTIONAL),
    _only("mse_loss", "input target" + _FUNCTIONAL_ENDS + " weight:nothing?", FUNCTIONAL, PRIVATE),
    _only("l1_loss", "input target" + _FUNCTIONAL_ENDS + " weight:nothing?", FUNCTIONAL, PRIVATE),
    _only("smooth_l1_loss", "input target" + _FUNCTIONAL_ENDS + " beta:number?", FUNCTIONAL, PRIVATE),
    _only(
        "huber_loss",
        "input target reduction:text=none|mean|sum? delta:number? weight:nothing?",
        FUNCTIONAL,
        PRIVATE,
    ),
    _only(
        "binary_cross_entropy_with_logits",
        "input target weight:value?" + _FUNCTIONAL_ENDS + " pos_weight:value?",
        FUNCTIONAL,
    ),
    _only("binary_cross_entropy", "input target weight:value?" + _FUNCTIONAL_ENDS, FUNCTIONAL),
]

_MATH = [
    LossOperation(f"math.{name}", (OperationParameter("x", "value", is_required=True),), (f"math.{name}",))
    for name in "ceil exp expm1 floor log log10 log1p log2 sqrt tanh".split()
]

GROUPS: dict[str, list[LossOperation]] = {
    "Element by element": _ELEMENTWISE,
    "Sums, maxima and products": _REDUCTIONS,
    "Shapes, indices and types": _SHAPES,
    "Losses of torch.nn.functional": _LOSSES,
    "Python numbers": _MATH,
}

# By target: "torch.exp" for a function, ".exp" for a method.
OPERATIONS: dict[str, LossOperation] = {
    target: operation for group in GROUPS.values() for operation in group for target in operation.targets
}

# The names of operations that combine elements.
REDUCTIONS = frozenset(each.name for each in (*_REDUCTIONS, *_LOSSES)) | {"sort", "topk"}
