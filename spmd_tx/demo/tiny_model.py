"""Writes small random checkpoints of every family in the Hugging Face layout."""

import json
import random
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import ml_dtypes
import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import save_file
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from spmd_tx.demo.tiny_families import FAMILIES, SEEING, stored_shapes
from spmd_tx.errors import StartError
from spmd_tx.models.families.registry import declare

END_OF_TEXT, TURN_START, TURN_END = SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
OF_IMAGES = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
BYTES = 256  # every byte is a token

# Tools and calls are written as Qwen3 writes them, so that agents can be tried.
CHAT_TEMPLATE = """\
{%- if tools %}
{{- '<|im_start|>system\\nTools:' }}
{%- for tool in tools %}
{{- '\\n' + tool | tojson }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
{{- '<|im_start|>' + message['role'] + '\\n' + message['content'] }}
{%- for call in message['tool_calls'] or [] %}
{{- '\\n<tool_call>\\n{"name": "' + call['function']['name'] + '", "arguments": ' }}
{{- call['function']['arguments'] | tojson + '}\\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""
# How images become patches: the file of the released models.
PREPROCESSOR = {
    "size": {"shortest_edge": 65536, "longest_edge": 16777216},  # pixels
    "patch_size": 16,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
    "processor_class": "Qwen3VLProcessor",
    "image_processor_type": "Qwen2VLImageProcessorFast",
}

# Contents of several parts are what the chats of models that see have.
CONTENT = """+ message['content'] }}"""
PARTS = """}}
{%- if message['content'] is string %}
{{- message['content'] }}
{%- else %}
{%- for part in message['content'] %}
{{- '<|vision_start|><|image_pad|><|vision_end|>' if part['type'] == 'image' else part['text'] }}
{%- endfor %}
{%- endif %}"""

# A word with its leading space, one digit, a run of marks with its line breaks, or white space.
WORDS = Regex(r" ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s+")


@dataclass(frozen=True)
class Spec:
    """Describes a checkpoint. The default sizes split evenly over up to 8 devices along every axis."""

    family: str = "qwen3"  # of tiny_families.FAMILIES; the others say there what experts they have
    n_layers: int = 2
    d_model: int = 64
    n_heads: int = 8
    n_kv_heads: int = 8
    head_dim: int = 16
    d_ff: int = 128  # of one expert, if there are any
    n_experts: int = 0  # 0: one feed-forward block for all tokens
    experts_per_token: int = 2
    normalize_expert_weights: bool = True
    vocab_size: int = 512  # of the model; the tokenizer may have fewer tokens
    max_positions: int = 2048  # tokens
    rope_theta: float = 1e6
    tied: bool = True
    dtype: Literal["float32", "bfloat16"] = "float32"
    n_shards: int = 1  # safetensors files
    std: float = 0.05  # of the random matrices
    sees: bool = False  # whether it has a vision tower; families of which all models have one need not say so


PRESETS = {
    "tiny": Spec(),
    "tiny-gqa": Spec(n_kv_heads=2, tied=False, n_shards=2),
    "tiny-moe": Spec(n_kv_heads=2, d_ff=32, n_experts=8),
}


def write(path: Path, spec: Spec = PRESETS["tiny"], seed: int = 0) -> Path:
    """Write the checkpoint and return its directory. The same arguments give the same bytes.

    Raises StartError where it cannot be written.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
        _write_files(path, spec, seed)
    except (OSError, SafetensorError) as problem:
        raise StartError(f"cannot write a model to {path}: {problem}; name another folder") from problem
    return path


def _write_files(path: Path, spec: Spec, seed: int) -> None:
    sees = "vision_config" in _of_family(spec)
    template = CHAT_TEMPLATE.replace(CONTENT, PARTS) if sees else CHAT_TEMPLATE
    tokenizer = train_tokenizer(spec.vocab_size, seed, (*(OF_IMAGES if sees else ()), *SPECIAL_TOKENS))
    ids = tokenizer.get_vocab()

    tokenizer.save(str(path / "tokenizer.json"))
    (path / "chat_template.jinja").write_text(template)
    _write_json(path / "tokenizer_config.json", _tokenizer_config(spec, template))
    if sees:
        _write_json(path / "preprocessor_config.json", PREPROCESSOR)
    _write_json(path / "config.json", model_config(spec, ids))
    _write_json(
        path / "generation_config.json",
        {"eos_token_id": [ids[TURN_END], ids[END_OF_TEXT]], "pad_token_id": ids[END_OF_TEXT]},
    )
    _write_weights(path, spec, seed)


def _random_weight(name: str, shape: tuple[int, ...], spec: Spec, seed: int) -> np.ndarray:
    # Seeded by name, so that a tensor does not depend on which others the spec asks for.
    noise = np.random.default_rng([seed, zlib.crc32(name.encode())]).standard_normal(shape)
    weight = 1 + 0.1 * noise if "norm" in name else spec.std * noise
    return weight.astype(ml_dtypes.bfloat16 if spec.dtype == "bfloat16" else np.float32)


def _write_weights(path: Path, spec: Spec, seed: int) -> None:
    shapes = stored_shapes(declare(model_config(spec, {}), drafts=True))
    tensors = {name: _random_weight(name, shape, spec, seed) for name, shape in shapes.items()}
    if spec.n_shards == 1:
        save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
        return
    weight_map: dict[str, str] = {}
    for number, names in enumerate(np.array_split(np.array(list(tensors)), spec.n_shards), start=1):
        file = f"model-{number:05}-of-{spec.n_shards:05}.safetensors"
        save_file({name: tensors[name] for name in names.tolist()}, path / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(names.tolist(), file)
    total_size = sum(tensor.nbytes for tensor in tensors.values())
    index = {"metadata": {"total_size": total_size}, "weight_map": weight_map}
    _write_json(path / "model.safetensors.index.json", index)


def model_config(spec: Spec, ids: dict[str, int]) -> dict[str, Any]:
    """Return what config.json says; ``ids`` are those of the special tokens, by their texts."""
    flat = _flat_config(spec, ids)
    return _seeing(flat, spec, ids) if "vision_config" in flat else flat


def _flat_config(spec: Spec, ids: dict[str, int]) -> dict[str, Any]:
    return {
        "model_type": spec.family,
        "intermediate_size": spec.d_ff,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": ids.get(END_OF_TEXT),
        "eos_token_id": ids.get(TURN_END),
        "head_dim": spec.head_dim,
        "hidden_act": "silu",
        "hidden_size": spec.d_model,
        "initializer_range": spec.std,
        "max_position_embeddings": spec.max_positions,
        "max_window_layers": spec.n_layers,
        "num_attention_heads": spec.n_heads,
        "num_hidden_layers": spec.n_layers,
        "num_key_value_heads": spec.n_kv_heads,
        "rms_norm_eps": 1e-6,
        "rope_scaling": None,
        "rope_theta": spec.rope_theta,
        "sliding_window": None,
        "tie_word_embeddings": spec.tied,
        "torch_dtype": spec.dtype,
        "use_cache": True,
        "use_sliding_window": False,
        "vocab_size": spec.vocab_size,
        **_of_family(spec),
    }


def _of_family(spec: Spec) -> dict[str, Any]:
    if spec.sees and "vision_config" not in FAMILIES[spec.family] and spec.family not in SEEING:
        raise StartError(f"no {spec.family} has a vision tower; those of {', '.join(SEEING)} may have one")
    if spec.family != "qwen3" or not spec.n_experts:
        return FAMILIES[spec.family] | (SEEING[spec.family] if spec.sees and spec.family in SEEING else {})
    return {
        **FAMILIES["qwen3_moe"],
        "model_type": "qwen3_moe",
        "intermediate_size": 3 * spec.d_ff,  # of layers without experts, of which there are none
        "moe_intermediate_size": spec.d_ff,
        "num_experts": spec.n_experts,
        "num_experts_per_tok": spec.experts_per_token,
        "norm_topk_prob": spec.normalize_expert_weights,
    }


def _seeing(flat: dict[str, Any], spec: Spec, ids: dict[str, int]) -> dict[str, Any]:
    """Return the config of a text model as that of one with a vision tower."""
    outer = "architectures", "tie_word_embeddings", "vision_config"
    text = {key: value for key, value in flat.items() if key not in outer}
    rope = text.get("rope_parameters") or {"rope_type": "default", "rope_theta": spec.rope_theta}
    pairs = int(spec.head_dim * rope.get("partial_rotary_factor", 1)) // 2
    turns = pairs // 3  # of time, row and column
    rope = rope | {"mrope_section": [pairs - 2 * turns, turns, turns], "mrope_interleaved": True}
    names = "vision_start_token_id", "vision_end_token_id", "image_token_id", "video_token_id"
    tokens = {key: ids.get(token) for key, token in zip(names, OF_IMAGES, strict=True)}
    return {
        **{key: flat[key] for key in outer},
        "model_type": spec.family,
        "text_config": text | {"model_type": f"{spec.family}_text", "rope_parameters": rope},
        "vision_config": flat["vision_config"] | {"model_type": spec.family, "out_hidden_size": spec.d_model},
        **tokens,
    }


def _tokenizer_config(spec: Spec, template: str) -> dict[str, Any]:
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": spec.max_positions,
        "eos_token": TURN_END,
        "pad_token": END_OF_TEXT,
        "additional_special_tokens": [TURN_START, TURN_END],
        "clean_up_tokenization_spaces": False,
        "chat_template": template,
    }


def train_tokenizer(vocab_size: int, seed: int, special: tuple[str, ...] = SPECIAL_TOKENS) -> Tokenizer:
    """Train byte-level BPE. The special tokens come last, as in Qwen's vocabularies. Raises ValueError."""
    if vocab_size < (least := BYTES + len(special)):
        raise ValueError(f"a vocabulary of {vocab_size} is too small; it must be at least {least}")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(WORDS, behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - len(special),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_sentences(seed, count=4000), trainer)
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    return tokenizer


def _sentences(seed: int, count: int) -> Iterator[str]:
    """Yield nonsense with the statistics of prose: few frequent words, many rare ones, numbers and marks."""
    draw = random.Random(seed)
    syllables = [
        consonant + vowel for consonant in "bdfgklmnprstvz" for vowel in ("a", "e", "i", "o", "u", "ai")
    ]
    lexicon = ["".join(draw.choices(syllables, k=draw.choice((1, 2, 2, 3)))) for _ in range(1500)]
    frequencies = [1 / rank for rank in range(2, len(lexicon) + 2)]  # Zipf's law
    for _ in range(count):
        words = draw.choices(lexicon, frequencies, k=draw.randint(4, 12))
        words.insert(draw.randint(1, len(words)), str(draw.randint(0, 99)))
        yield " ".join(words).capitalize() + draw.choice(".!?") + "\n"


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n")
