"""Small models in the layouts in which each family is published: which files there are, and what is in which.

The names of files are those of the listings of the repositories. What the server has no use for holds a word
instead of weights: it must never be asked for.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
from safetensors.numpy import load_file, save_file
from tokenizers import Tokenizer

from spmd_tx.demo import tiny_model
from spmd_tx.demo.tiny_families import PLACED, TOWER
from spmd_tx.models.checkpoint.index import INDEX_FILE, SINGLE_FILE
from tests.support.rank_files import KIMI_TOKENS, token_bytes, write_tekken, write_tiktoken

QWEN_ENDS = ("<|im_end|>", "<|endoftext|>")
OF_VISION = {"vision_config": {"depth": 1}}


@dataclass(frozen=True)
class Outer:
    """Describes a model with vision around the text model."""

    config: Mapping[str, Any]
    name: Callable[[str], str]  # of a tensor, from that in the text model
    towers: tuple[str, ...]  # tensors that are not of the text model


@dataclass(frozen=True)
class Release:
    """Describes one repository."""

    family: str
    others: tuple[str, ...] = ()  # files that are never downloaded
    small: tuple[str, ...] = ()  # further ones beside the weights
    shard: str | None = "model-{:05}-of-{:05}.safetensors"  # None: a single file
    first_shard: int = 1
    tokenizer: Literal["json", "tiktoken", "tekken"] = "json"
    template: Literal["jinja", "json", "config", "none"] = "config"
    ends: tuple[str, ...] = QWEN_ENDS  # what ends a sample
    ends_in: Literal["generation", "config", "text_config", "tokenizer"] = "generation"
    outer: Outer | None = None
    config: Mapping[str, Any] = field(default_factory=dict)


KIMI = Outer(
    {"architectures": ["KimiK25ForConditionalGeneration"], "model_type": "kimi_k25"},
    lambda name: f"language_model.{name}",
    ("vision_tower.encoder.blocks.0.norm0.weight", "mm_projector.proj.0.bias"),
)
MISTRAL = Outer(
    {"architectures": ["Mistral3ForConditionalGeneration"], "model_type": "mistral3"},
    lambda name: f"language_model.{name}",
    ("vision_tower.ln_pre.weight", "multi_modal_projector.linear_1.weight"),
)


def _qwen_3_5(architecture: str, kind: str) -> Outer:
    return Outer(
        {
            "architectures": [architecture],
            "model_type": kind,
            "vision_config": {**TOWER, "out_hidden_size": 64},
        },
        lambda name: name.replace("model.", "model.language_model.", 1),
        ("model.visual.patch_embed.proj.bias", "mtp.norm.weight"),
    )


README = (".gitattributes", "README.md", "LICENSE")
KIMI_CODE = (
    "configuration_deepseek.py",
    "modeling_deepseek.py",
    "tokenization_kimi.py",
    "THIRD_PARTY_NOTICES.md",
)
QWEN_SMALL = ("merges.txt", "vocab.json")
RELEASES = {
    "Qwen/Qwen3-8B": Release("qwen3", README, QWEN_SMALL),
    "Qwen/Qwen3-30B-A3B": Release("qwen3_moe", README, QWEN_SMALL),
    "Qwen/Qwen2.5-0.5B-Instruct": Release("qwen2", README, QWEN_SMALL, shard=None),
    "Qwen/Qwen3.5-9B": Release(
        "qwen3_5",
        README,
        (*QWEN_SMALL, "preprocessor_config.json", "video_preprocessor_config.json"),
        shard="model.safetensors-{:05}-of-{:05}.safetensors",
        template="jinja",
        ends=("<|endoftext|>",),
        ends_in="text_config",
        outer=_qwen_3_5("Qwen3_5ForConditionalGeneration", "qwen3_5"),
        config={"rope_parameters": {**PLACED, "mrope_section": [2, 1, 1]}},
    ),
    "Qwen/Qwen3.5-35B-A3B": Release(
        "qwen3_5_moe",
        README,
        (*QWEN_SMALL, "preprocessor_config.json", "video_preprocessor_config.json"),
        shard="model.safetensors-{:05}-of-{:05}.safetensors",
        template="jinja",
        outer=_qwen_3_5("Qwen3_5MoeForConditionalGeneration", "qwen3_5_moe"),
        config={"rope_parameters": {**PLACED, "mrope_section": [2, 1, 1]}},
    ),
    "Qwen/Qwen3-VL-8B-Instruct": Release(
        "qwen3_vl",
        README,
        (*QWEN_SMALL, "chat_template.json", "preprocessor_config.json", "video_preprocessor_config.json"),
        template="jinja",
    ),
    "Qwen/Qwen3-VL-30B-A3B-Instruct": Release(
        "qwen3_vl_moe",
        README,
        (*QWEN_SMALL, "chat_template.json", "preprocessor_config.json", "video_preprocessor_config.json"),
        template="jinja",
    ),
    "meta-llama/Llama-3.1-8B-Instruct": Release(
        "llama",
        (
            *README,
            "USE_POLICY.md",
            "original/consolidated.00.pth",
            "original/params.json",
            "original/tokenizer.model",
        ),
        ("special_tokens_map.json",),
    ),
    "mistralai/Mistral-7B-v0.3": Release(
        "mistral",
        (".gitattributes", "README.md", "consolidated.safetensors", "tokenizer.model.v3"),
        ("params.json", "special_tokens_map.json", "tokenizer.model"),
        template="none",
        ends=("<|endoftext|>",),
    ),
    "mistralai/Mistral-Small-3.1-24B-Instruct-2503": Release(
        "mistral",
        (".gitattributes", "README.md", "consolidated.safetensors"),
        (
            *("SYSTEM_PROMPT.txt", "params.json", "preprocessor_config.json", "processor_config.json"),
            *("special_tokens_map.json", "tekken.json"),
        ),
        template="json",
        ends=("<|endoftext|>",),
        outer=MISTRAL,
    ),
    "mistralai/Mistral-Small-3.2-24B-Instruct-2506": Release(
        "mistral",
        (".gitattributes", "README.md", "consolidated.safetensors"),
        ("SYSTEM_PROMPT.txt", "params.json"),
        tokenizer="tekken",
        template="none",
        ends=("</s>",),
        outer=MISTRAL,
    ),
    "mistralai/Ministral-3-8B-Instruct-2512-BF16": Release(
        "ministral3",
        (".gitattributes", "README.md", "consolidated.safetensors", "consolidated.safetensors.index.json"),
        ("SYSTEM_PROMPT.txt", "params.json", "processor_config.json", "tekken.json"),
        template="jinja",
        ends=("<|endoftext|>",),
        outer=MISTRAL,
    ),
    "microsoft/phi-4": Release(
        "phi3",
        README,
        ("merges.txt", "special_tokens_map.json", "vocab.json"),
        ends=("<|im_end|>",),
    ),
    "HuggingFaceTB/SmolLM3-3B": Release(
        "smollm3",
        (".gitattributes", "README.md", "onnx/model.onnx", "onnx/config.json"),
        ("special_tokens_map.json",),
        template="jinja",
        ends=("<|im_end|>",),
    ),
    "zai-org/GLM-4.5-Air": Release("glm4_moe", README[:2], template="jinja"),
    "zai-org/GLM-4.7-Flash": Release("glm4_moe_lite", README[:2], template="jinja", ends_in="config"),
    "deepseek-ai/DeepSeek-V3.1": Release(
        "deepseek_v3",
        (
            *README,
            *("assets/chat_format.jinja", "assets/code_agent_trajectory.html", "inference/model.py"),
            *("inference/configs/config_671B_v3.1.json", "configuration_deepseek.py", "modeling_deepseek.py"),
        ),
        shard="model-{:05}-of-{:06}.safetensors",
        ends=("<|endoftext|>",),
        config={"auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV3Config"}},
    ),
    "moonshotai/Kimi-K2-Instruct": Release(
        "deepseek_v3",
        (*README, *KIMI_CODE, "docs/deploy_guidance.md", "figures/kimi-logo.png"),
        shard="model-{}-of-{}.safetensors",
        tokenizer="tiktoken",
        template="jinja",
        ends=("<|im_end|>",),
        config={"auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV3Config"}},
    ),
    "moonshotai/Kimi-K2.5": Release(
        "deepseek_v3",
        (*README, *KIMI_CODE, "tool_declaration_ts.py", "figures/demo_video.mp4"),
        ("preprocessor_config.json",),
        shard="model-{:05}-of-{:06}.safetensors",
        tokenizer="tiktoken",
        template="config",
        ends=("[EOS]",),
        ends_in="tokenizer",
        outer=KIMI,
    ),
    "openai/gpt-oss-20b": Release(
        "gpt_oss",
        (
            *(*README, "USAGE_POLICY", "metal/model.bin"),
            *("original/config.json", "original/dtypes.json", "original/model.safetensors"),
        ),
        ("special_tokens_map.json",),
        first_shard=0,
        template="jinja",
    ),
}


def write_release(path: Path, name: str) -> Path:
    """Write the repository of a model, and return its directory."""
    release = RELEASES[name]
    tiny_model.write(path, tiny_model.Spec(family=release.family, tied=False))
    ids = _write_tokenizer(path, release)
    _write_configs(path, release, [ids[text] for text in release.ends])
    _write_weights(path, release)
    for other in (*release.others, *release.small):
        (path / other).parent.mkdir(parents=True, exist_ok=True)
        if not (path / other).exists():
            (path / other).write_text(json.dumps({other: None}))  # the cache keeps equal files once
    return path


def needed(path: Path, name: str) -> set[str]:
    """The files that must be downloaded."""
    release = RELEASES[name]
    found = {str(file.relative_to(path)) for file in path.rglob("*") if file.is_file()}
    return found - set(release.others)


def _write_tokenizer(path: Path, release: Release) -> dict[str, int]:
    """Write the files of the tokenizer and the template, and return the numbers of tokens by their texts."""
    template, config = (path / "chat_template.jinja").read_text(), _read(path / "tokenizer_config.json")
    (path / "chat_template.jinja").unlink()
    del config["chat_template"]
    match release.template:
        case "jinja":
            (path / "chat_template.jinja").write_text(template)
        case "json":
            _write(path / "chat_template.json", {"chat_template": template})
        case "config":
            config["chat_template"] = template
    plain = Tokenizer.from_file(str(path / "tokenizer.json"))
    ids = plain.get_vocab()
    if release.tokenizer == "tekken":
        (path / "tokenizer.json").unlink()
        (path / "tokenizer_config.json").unlink()
        return write_tekken(path, token_bytes(plain), vocab_size=512)
    if release.tokenizer == "tiktoken":
        (path / "tokenizer.json").unlink()
        ids = write_tiktoken(path, token_bytes(plain)[:480])
        config |= _read(path / "tokenizer_config.json")
        config["additional_special_tokens"] = [text for text in KIMI_TOKENS.values() if "im_" in text]
    if release.ends_in == "tokenizer":
        config["eos_token"] = release.ends[0]
    _write(path / "tokenizer_config.json", config)
    return ids


def _write_configs(path: Path, release: Release, ends: list[int]) -> None:
    config = _read(path / "config.json") | dict(release.config)
    config["eos_token_id"] = None
    (path / "generation_config.json").unlink()
    shown = ends if len(ends) > 1 else ends[0]
    if release.ends_in == "generation":
        config["eos_token_id"] = ends[0]
        _write(path / "generation_config.json", {"eos_token_id": shown, "transformers_version": "4.56.2"})
    elif release.ends_in in ("config", "text_config"):
        config["eos_token_id"] = shown
    if release.outer is not None:
        tied, text = config["tie_word_embeddings"], config
        config = {**OF_VISION, **release.outer.config, "text_config": text, "tie_word_embeddings": tied}
    _write(path / "config.json", config)


def _write_weights(path: Path, release: Release) -> None:
    tensors = load_file(path / SINGLE_FILE)
    if release.outer is not None:
        tensors = {release.outer.name(name): tensor for name, tensor in tensors.items()}
        tensors |= dict.fromkeys(release.outer.towers, np.ones(8, np.float32))
    (path / SINGLE_FILE).unlink()
    if release.shard is None:
        save_file(tensors, path / SINGLE_FILE, metadata={"format": "pt"})
        return
    weight_map: dict[str, str] = {}
    for number, names in enumerate(np.array_split(np.array(sorted(tensors)), 2)):
        file = release.shard.format(number + release.first_shard, 2)
        save_file({name: tensors[name] for name in names.tolist()}, path / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(names.tolist(), file)
    _write(path / INDEX_FILE, {"metadata": {"total_size": 1}, "weight_map": weight_map})


def _read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_bytes())


def _write(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content))
