"""What config.json says of models that people use, as far as sizes follow from it."""

import json
from pathlib import Path
from typing import Any

Config = dict[str, Any]


def attention(width: int, heads: int, kv_heads: int, head_dim: int = 128) -> Config:
    return {
        "hidden_size": width,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
    }


def dense(architecture: str, layers: int, inner: int, vocabulary: int, positions: int, **more: Any) -> Config:
    return {
        "architectures": [architecture],
        "num_hidden_layers": layers,
        "intermediate_size": inner,
        "vocab_size": vocabulary,
        "max_position_embeddings": positions,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        **more,
    }


def qwen3(layers: int, inner: int) -> Config:
    return dense("Qwen3ForCausalLM", layers, inner, 151936, 40960)


def qwen3_moe(layers: int, inner: int) -> Config:
    experts = {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": inner}
    return dense("Qwen3MoeForCausalLM", layers, inner, 151936, 40960, **experts)


def llama(layers: int, inner: int, **more: Any) -> Config:
    return dense("LlamaForCausalLM", layers, inner, 128256, 131072, **more)


def deepseek(experts: int, first: int, groups: int, **more: Any) -> Config:
    """Return a DeepSeek-V3 or one like it: 61 layers, of which the first ones are dense."""
    latent = {
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
    }
    router = {
        "n_group": groups,
        "topk_group": groups // 2 or 1,
        "n_shared_experts": 1,
        "num_experts_per_tok": 8,
    }
    sizes = {"n_routed_experts": experts, "moe_intermediate_size": 2048, "first_k_dense_replace": first}
    return dense("DeepseekV3ForCausalLM", 61, 18432, positions=131072, **latent, **router, **sizes, **more)


def glm4_moe(layers: int, first: int, experts: int, inner: int, dense_inner: int) -> Config:
    sizes = {"n_routed_experts": experts, "moe_intermediate_size": inner, "first_k_dense_replace": first}
    more = {"n_shared_experts": 1, "num_experts_per_tok": 8, "attention_bias": True}
    return dense("Glm4MoeForCausalLM", layers, dense_inner, 151552, 131072, **sizes, **more)


def gpt_oss(layers: int, experts: int) -> Config:
    yarn = {"rope_type": "yarn", "factor": 32.0, "truncate": False, "original_max_position_embeddings": 4096}
    sizes = {"num_local_experts": experts, "num_experts_per_tok": 4, "sliding_window": 128}
    return dense("GptOssForCausalLM", layers, 2880, 201088, 131072, **sizes, rope_scaling=yarn)


def stored(name: str) -> Config:
    return json.loads((Path(__file__).parents[1] / "aot" / "configs" / name / "config.json").read_text())


def qwen3_5(like: str, **changed: Any) -> Config:
    """Return a Qwen3.5 with other sizes than the stored one."""
    raw = stored(like)
    text = raw["text_config"] | changed
    tower = raw["vision_config"] | {"out_hidden_size": text["hidden_size"]}
    return raw | {"text_config": text, "vision_config": tower}


def kimi(text: Config) -> Config:
    """Return a Kimi-K2.5: what was Kimi-K2 before, in a model with vision."""
    return {"architectures": ["KimiK25ForConditionalGeneration"], "text_config": text}


def qwen3_vl(text: Config) -> Config:
    """Return a Qwen3-VL: what was a mixture of Qwen3 before, in a model with vision."""
    names = {"architectures": ["Qwen3VLMoeForConditionalGeneration"]}
    return names | {"text_config": text | {"max_position_embeddings": 262144}}


TIED = {"tie_word_embeddings": True}
CONFIGS: dict[str, Config] = {
    "Qwen/Qwen3-4B": qwen3(36, 9728) | attention(2560, 32, 8) | TIED,
    "Qwen/Qwen3-8B": qwen3(36, 12288) | attention(4096, 32, 8),
    "Qwen/Qwen3-32B": qwen3(64, 25600) | attention(5120, 64, 8),
    "Qwen/Qwen3-30B-A3B": qwen3_moe(48, 768) | attention(2048, 32, 4),
    "Qwen/Qwen3-235B-A22B": qwen3_moe(94, 1536) | attention(4096, 64, 4),
    "Qwen/Qwen3.5-9B": stored("qwen3.5-9b"),
    "Qwen/Qwen3.5-35B-A3B": stored("qwen3.5-35b-a3b"),
    "Qwen/Qwen2.5-7B": dense("Qwen2ForCausalLM", 28, 18944, 152064, 32768) | attention(3584, 28, 4),
    "meta-llama/Llama-3.2-1B": llama(16, 8192) | attention(2048, 32, 8, 64) | TIED,
    "meta-llama/Llama-3.2-3B": llama(28, 8192) | attention(3072, 24, 8) | TIED,
    "meta-llama/Llama-3.1-8B": llama(32, 14336) | attention(4096, 32, 8),
    "meta-llama/Llama-3.1-70B": llama(80, 28672) | attention(8192, 64, 8),
    "mistralai/Mistral-7B-v0.3": dense("MistralForCausalLM", 32, 14336, 32768, 32768)
    | attention(4096, 32, 8),
    "microsoft/phi-4": dense("Phi3ForCausalLM", 40, 17920, 100352, 16384) | attention(5120, 40, 10),
    "HuggingFaceTB/SmolLM3-3B": dense("SmolLM3ForCausalLM", 36, 11008, 128256, 65536)
    | attention(2048, 16, 4)
    | TIED,
    "zai-org/GLM-4.5-Air": glm4_moe(46, 1, 128, 1408, 10944) | attention(4096, 96, 8),
    "zai-org/GLM-4.6": glm4_moe(92, 3, 160, 1536, 12288) | attention(5120, 96, 8),
    "zai-org/GLM-4.7-Flash": stored("glm-4.7-flash"),
    "deepseek-ai/DeepSeek-V3.1": deepseek(256, 3, 8, vocabulary=129280) | attention(7168, 128, 128),
    "moonshotai/Kimi-K2-Thinking": deepseek(384, 1, 1, vocabulary=163840) | attention(7168, 64, 64),
    "openai/gpt-oss-20b": gpt_oss(24, 32) | attention(2880, 64, 8, 64),
    "openai/gpt-oss-120b": gpt_oss(36, 128) | attention(2880, 64, 8, 64),
}
# Hosted models besides, for which no plan is published.
HOSTED: dict[str, Config] = {
    "Qwen/Qwen3.5-4B": qwen3_5("qwen3.5-9b", hidden_size=2560, intermediate_size=9216),
    "Qwen/Qwen3.5-27B": qwen3_5(
        "qwen3.5-9b",
        hidden_size=5120,
        intermediate_size=17408,
        num_hidden_layers=64,
        num_attention_heads=24,
        linear_num_value_heads=48,
    ),
    "Qwen/Qwen3.5-397B-A17B": qwen3_5(
        "qwen3.5-35b-a3b",
        hidden_size=4096,
        num_hidden_layers=60,
        num_attention_heads=32,
        num_experts=512,
        num_experts_per_tok=10,
        moe_intermediate_size=1024,
        shared_expert_intermediate_size=1024,
        linear_num_value_heads=64,
    ),
    "Qwen/Qwen3-VL-30B-A3B-Instruct": qwen3_vl(CONFIGS["Qwen/Qwen3-30B-A3B"]),
    "Qwen/Qwen3-VL-235B-A22B-Instruct": qwen3_vl(CONFIGS["Qwen/Qwen3-235B-A22B"]),
    "moonshotai/Kimi-K2.6": kimi(CONFIGS["moonshotai/Kimi-K2-Thinking"]),
}
# Hosted names, and the known model that has the same sizes.
ALIKE = {
    "Qwen/Qwen3-235B-A22B-Instruct-2507": "Qwen/Qwen3-235B-A22B",
    "Qwen/Qwen3-30B-A3B-Base": "Qwen/Qwen3-30B-A3B",
    "Qwen/Qwen3-30B-A3B-Instruct-2507": "Qwen/Qwen3-30B-A3B",
    "Qwen/Qwen3-4B-Instruct-2507": "Qwen/Qwen3-4B",
    "Qwen/Qwen3-8B-Base": "Qwen/Qwen3-8B",
    "Qwen/Qwen3.5-35B-A3B-Base": "Qwen/Qwen3.5-35B-A3B",
    "Qwen/Qwen3.5-9B-Base": "Qwen/Qwen3.5-9B",
    "Qwen/Qwen3.6-27B": "Qwen/Qwen3.5-27B",
    "Qwen/Qwen3.6-35B-A3B": "Qwen/Qwen3.5-35B-A3B",
    "Qwen/Qwen3.8-27B": "Qwen/Qwen3.5-27B",
    "deepseek-ai/DeepSeek-V3.1-Base": "deepseek-ai/DeepSeek-V3.1",
    "meta-llama/Llama-3.1-8B-Instruct": "meta-llama/Llama-3.1-8B",
    "meta-llama/Llama-3.3-70B-Instruct": "meta-llama/Llama-3.1-70B",
    "moonshotai/Kimi-K2.5": "moonshotai/Kimi-K2.6",
}
