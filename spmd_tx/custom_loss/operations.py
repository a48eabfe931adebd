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


def _operation(name: str, signature: str, *more: str, both: bool = True, note: str = "") -> LossOperation:
    """Describe an operation; with ``both``, torch has a function and a method of this name."""
    targets = (f"torch.{name}", f".{name}", *more) if both else more
    return LossOperation(name, tuple(map(_parameter, signature.split())), targets, note)


def _functional(name: str) -> tuple[str, str]:
    """Return both names of a function of torch.nn.functional: some versions of torch record private ones."""
    private = {"logsigmoid": "log_sigmoid"}.get(name, name)
    return f"torch.nn.functional.{name}", f"torch._C._nn.{private}"


def _special(name: str) -> tuple[str, str]:
    return f"torch.special.{name}", f"torch._C._special.special_{name}"


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
    _operation("expm1", "x", *_special("expm1")),
    _operation("log", "x"),
    _operation("log1p", "x", *_special("log1p")),
    _operation("sigmoid", "x", "torch.nn.functional.sigmoid", *_special("expit")),
    _operation("tanh", "x", "torch.nn.functional.tanh"),
    _operation("relu", "x inplace:nothing?", *_functional("relu")),
    _operation("silu", "x inplace:nothing?", *_functional("silu"), both=False),
    _operation("elu", "x alpha:number? inplace:nothing?", *_functional("elu"), both=False),
    _operation(
        "leaky_relu",
        "x negative_slope:number? inplace:nothing?",
        *_functional("leaky_relu"),
        both=False,
    ),
    _operation("gelu", "x approximate:text=none|tanh?", *_functional("gelu"), both=False),
    _operation("logsigmoid", "x", *_functional("logsigmoid"), both=False),
    _operation("softplus", "x beta:number? threshold:number?", *_functional("softplus"), both=False),
    _operation("logit", "x eps:number?", *_special("logit")),
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
    _operation("xlogy", "x:value other:value", *_special("xlogy")),
    _operation("clamp", "x min:value? max:value?", "torch.clip", ".clip"),
    _operation("clamp_min", "x min:value"),
    _operation("clamp_max", "x max:value"),
    _operation("where", "condition x:value other:value", "torch.where", both=False),
    _operation("where_method", "x condition other:value", ".where", both=False),
    _operation("masked_fill", "x mask value:value"),
    _operation("lerp", "x end weight:value"),
    _operation("nan_to_num", "x nan:number? posinf:number? neginf:number?"),
    _operation("detach", "x"),
    _operation("clone", "x memory_format:nothing?"),
    _operation("contiguous", "x", ".contiguous", both=False),
]

_REDUCTION = "x dim:dims? keepdim:bool?"

_REDUCTIONS = [
    _operation("sum", _REDUCTION + " dtype:dtype?"),
    _operation("mean", _REDUCTION + " dtype:dtype?"),
    _operation("prod", "x dim:dims? keepdim:bool?"),
    _operation("amax", _REDUCTION),
    _operation("amin", _REDUCTION),
    _operation(
        "max", "x dim:value? keepdim:bool?", note="of all elements, along one dimension, or of two tensors"
    ),
    _operation(
        "min", "x dim:value? keepdim:bool?", note="of all elements, along one dimension, or of two tensors"
    ),
    _operation("argmax", "x dim:int? keepdim:bool?"),
    _operation("argmin", "x dim:int? keepdim:bool?"),
    _operation("any", _REDUCTION),
    _operation("all", _REDUCTION),
    _operation("count_nonzero", "x dim:dims?"),
    _operation("logsumexp", "x dim:dims keepdim:bool?", *_special("logsumexp")),
    _operation("var", "x dim:dims? unbiased:bool? keepdim:bool? correction:number?"),
    _operation("std", "x dim:dims? unbiased:bool? keepdim:bool? correction:number?"),
    _operation(
        "norm",
        "x p:number? dim:dims? keepdim:bool? dtype:dtype?",
        ".norm",
        "torch.linalg.vector_norm",
        "torch._C._linalg.linalg_vector_norm",
        both=False,
        note="p is 1, 2 or inf",
    ),
    _operation(
        "softmax",
        "x dim:int? _stacklevel:int? dtype:dtype?",
        "torch.nn.functional.softmax",
        both=False,
    ),
    _operation(
        "softmax_function",
        "x dim:int dtype:dtype?",
        "torch.softmax",
        ".softmax",
        *_special("softmax"),
        both=False,
    ),
    _operation(
        "log_softmax",
        "x dim:int? _stacklevel:int? dtype:dtype?",
        "torch.nn.functional.log_softmax",
        both=False,
    ),
    _operation(
        "log_softmax_function",
        "x dim:int dtype:dtype?",
        "torch.log_softmax",
        ".log_softmax",
        *_special("log_softmax"),
        both=False,
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
    _operation(
        "einsum", "equation:text operands:tensors", "torch.functional.einsum", "torch.einsum", both=False
    ),
]

_SHAPES = [
    _operation(
        "getattr",
        "x name:text=shape|ndim|dtype|device|T|values|indices",
        "getattr",
        both=False,
        note="x.shape, x.ndim, x.T",
    ),
    _operation("size", "x dim:int?", ".size", both=False),
    _operation("numel", "x", note="counts the datum's own tokens"),
    _operation("dim", "x", ".dim", ".ndimension", both=False),
    _operation(
        "getitem",
        "x:value index:index",
        "operator.getitem",
        both=False,
        note="no tensors of bool, no steps over tokens",
    ),
    _operation("unsqueeze", "x dim:int"),
    _operation("squeeze", "x dim:dims?"),
    _operation("reshape", "x shape:sizes", ".view", note="the token dimension stays the first"),
    _operation("flatten", "x start_dim:int? end_dim:int?"),
    _operation("transpose", "x dim0:int dim1:int", "torch.swapaxes", ".swapaxes"),
    _operation("t", "x"),
    _operation("permute", "x dims:sizes"),
    _operation("expand", "x size:sizes", ".expand", both=False),
    _operation("expand_as", "x other", ".expand_as", both=False),
    _operation("view_as", "x other", ".view_as", ".reshape_as", both=False),
    _operation(
        "cat", "tensors:tensors dim:int?", "torch.cat", "torch.concat", "torch.concatenate", both=False
    ),
    _operation("stack", "tensors:tensors dim:int?", "torch.stack", both=False),
    _operation(
        "pad",
        "x pad:sizes mode:text=constant? value:number?",
        "torch.nn.functional.pad",
        both=False,
        note="the last dimension",
    ),
    _operation("flip", "x dims:sizes"),
    _operation("diff", "x n:int? dim:int?"),
    _operation("gather", "x dim:int index sparse_grad:nothing?"),
    _operation("take_along_dim", "x indices dim:int"),
    _operation("sort", "x dim:int? descending:bool? stable:bool?"),
    _operation("topk", "x k:int dim:int? largest:bool? sorted:bool?"),
    _operation("zeros_like", "x dtype:dtype? device:nothing?", "torch.zeros_like", both=False),
    _operation("ones_like", "x dtype:dtype? device:nothing?", "torch.ones_like", both=False),
    _operation("full_like", "x value:value dtype:dtype? device:nothing?", "torch.full_like", both=False),
    _operation("new_zeros", "x size:sizes dtype:dtype? device:nothing?", ".new_zeros", both=False),
    _operation("new_ones", "x size:sizes dtype:dtype? device:nothing?", ".new_ones", both=False),
    _operation("new_full", "x size:dims value:value dtype:dtype? device:nothing?", ".new_full", both=False),
    _operation("zeros", "size:sizes dtype:dtype? device:nothing?", "torch.zeros", both=False),
    _operation("ones", "size:sizes dtype:dtype? device:nothing?", "torch.ones", both=False),
    _operation("full", "size:dims value:value dtype:dtype? device:nothing?", "torch.full", both=False),
    _operation(
        "arange", "start:int end:int? step:int? dtype:dtype? device:nothing?", "torch.arange", both=False
    ),
    _operation("to", "x target:value? dtype:dtype? device:nothing?", ".to", both=False),
    _operation("type_as", "x other", ".type_as", both=False),
    *(
        _operation(name, "x", f".{name}", both=False)
        for name in "float double long int bool half bfloat16".split()
    ),
    _operation("cpu", "x", ".cpu", both=False),
]

_FUNCTIONAL_ENDS = " size_average:nothing? reduce:nothing? reduction:text=none|mean|sum|batchmean?"

_LOSSES = [
    _operation(
        "kl_div",
        "input target" + _FUNCTIONAL_ENDS + " log_target:bool?",
        "torch.nn.functional.kl_div",
        both=False,
    ),
    _operation(
        "mse_loss",
        "input target" + _FUNCTIONAL_ENDS + " weight:nothing?",
        *_functional("mse_loss"),
        both=False,
    ),
    _operation(
        "l1_loss", "input target" + _FUNCTIONAL_ENDS + " weight:nothing?", *_functional("l1_loss"), both=False
    ),
    _operation(
        "smooth_l1_loss",
        "input target" + _FUNCTIONAL_ENDS + " beta:number?",
        *_functional("smooth_l1_loss"),
        both=False,
    ),
    _operation(
        "huber_loss",
        "input target reduction:text=none|mean|sum? delta:number? weight:nothing?",
        *_functional("huber_loss"),
        both=False,
    ),
    _operation(
        "binary_cross_entropy_with_logits",
        "input target weight:value?" + _FUNCTIONAL_ENDS + " pos_weight:value?",
        "torch.nn.functional.binary_cross_entropy_with_logits",
        both=False,
    ),
    _operation(
        "binary_cross_entropy",
        "input target weight:value?" + _FUNCTIONAL_ENDS,
        "torch.nn.functional.binary_cross_entropy",
        both=False,
    ),
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
