"""Compares the names that adapters give their base models: of repositories, copies and folders. No JAX."""

import re

SNAPSHOT = re.compile(r"(?:.*/)?models--(?P<name>[^/]+)/snapshots/[^/]+")  # in the cache of huggingface_hub
# What publishers append to the name of a model whose numbers they store otherwise. Adapters that were trained
# beside such a copy are applied to the model itself.
ENCODINGS = (
    "unsloth",
    "dynamic",
    "bnb",
    "4bit",
    "8bit",
    "nf4",
    "int4",
    "int8",
    "fp4",
    "fp8",
    "fp16",
    "bf16",
    "mxfp4",
    "nvfp4",
    "w4a16",
    "w8a8",
    "w8a16",
    "awq",
    "gptq",
    "mlx",
)
ENCODED = re.compile(rf"(?:[-_.](?:{'|'.join(ENCODINGS)}))+")
UNREADABLE = re.compile(r"[-_.](?:bnb[-_.](?:4|8)bit|awq|gptq\b.*|mlx\b.*)", re.IGNORECASE)
FORMER = ("meta-",)  # with which names of models began before their publisher renamed them


def are_same(one: str, other: str) -> bool:
    """Whether both are names of one model: as a repository, a copy in another encoding, or a directory."""
    return _model(one) == _model(other)


def is_encoded_copy(name: str) -> bool:
    """Whether the name is that of a copy whose encoding is not read here."""
    return UNREADABLE.search(_last_part(name)) is not None


def _model(name: str) -> str:
    model = _last_part(name).casefold()
    for former in FORMER:
        model = model.removeprefix(former)
    match = re.search(rf"{ENCODED.pattern}$", model)
    return model[: match.start()] if match and match.start() else model


def _last_part(name: str) -> str:
    path = name.replace("\\", "/").rstrip("/")
    cached = SNAPSHOT.fullmatch(path)
    if cached is not None:
        return cached["name"].rpartition("--")[2]
    return path.rpartition("/")[2].partition(":")[0]
