"""Says which files of a released model are needed, by their names. Pure.

Many releases have their weights twice: beside the files that transformers reads, in others for other programs
(``consolidated.safetensors``, ``original/``, ``metal/``, ``onnx/``, ``.bin``, ``.gguf``).
"""

from collections.abc import Collection, Iterable
from fnmatch import fnmatch

from spmd_tx.models.checkpoint.index import INDEX_FILE, SINGLE_FILE

CONFIG, GENERATION = "config.json", "generation_config.json"
TOKENIZER = "tokenizer.json"
TOKENIZERS = (TOKENIZER, "tekken.json", "tiktoken.model")  # the first that is there is read
TEMPLATES = "additional_chat_templates/"
READ = (  # what is read beside the weights, where a model has it
    *(CONFIG, GENERATION, *TOKENIZERS, INDEX_FILE),
    *("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("chat_template.jinja", "chat_template.json", f"{TEMPLATES}*.jinja"),
)
FETCHED = (".json", ".jinja", ".model", ".txt")  # which an exported model has, too
OTHER_TOKENIZERS = ("tokenizer.model", "vocab.json", "spiece.model")
OTHER_WEIGHTS = ("pytorch_model*.bin", "*.gguf", "*.pth", "tf_model*.h5", "flax_model*.msgpack", "*.onnx")


def beside_weights(names: Iterable[str]) -> list[str]:
    """Choose what is downloaded besides the weights: configuration, tokenizer and templates, but no code."""
    return [
        name
        for name in names
        if name.endswith(FETCHED)
        and ("/" not in name or name.startswith(TEMPLATES))
        and (not name.endswith(".index.json") or name == INDEX_FILE)
    ]


def problem(names: Collection[str]) -> str | None:
    """Say what a model with these files lacks, and what helps; None: at most shards that an index names."""
    if CONFIG not in names:
        return f"has no {CONFIG}; a complete model in the Hugging Face layout has it{_of_others(names)}"
    if not any(name in names for name in TOKENIZERS):
        other = next((name for name in OTHER_TOKENIZERS if name in names), None)
        if other is None:
            return f"has no {TOKENIZER}; a complete model in the Hugging Face layout has it"
        return (
            f"has no {TOKENIZER}, and of {other} none is made here; load the tokenizer with transformers "
            "(AutoTokenizer.from_pretrained), and save it (save_pretrained) beside the weights"
        )
    if SINGLE_FILE not in names and INDEX_FILE not in names:
        return f"has no {SINGLE_FILE}; the model's weights are missing or incomplete{_of_others(names)}"
    return None


def _of_others(names: Collection[str]) -> str:
    """Name weights of a layout that is not read, and how to come to one that is."""
    others = (name for name in sorted(names) if any(fnmatch(name, other) for other in OTHER_WEIGHTS))
    other = next(others, None)
    if other is not None:
        return (
            f". It has {other}, and weights are read from safetensors files only: load the model with "
            "transformers, and save it with save_pretrained, which writes them"
        )
    other = next((name for name in sorted(names) if name.endswith(".safetensors")), None)
    if other is not None and other != SINGLE_FILE:
        return f". It has {other}, which is of another layout; take the model's release for transformers"
    return ""
