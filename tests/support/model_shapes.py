"""Lists the shapes of models for tests and benchmarks: real and tiny ones."""

from dataclasses import replace

from spmd_tx.models.config import ModelConfig

QWEN3_8B = ModelConfig(
    architecture="Qwen3ForCausalLM",
    vocab_size=151936,
    d_model=4096,
    d_ff=12288,
    n_layers=36,
    n_heads=32,
    n_kv_heads=8,
    head_dim=128,
    rope_theta=1e6,
    rms_norm_eps=1e-6,
    tied_embeddings=False,
    max_positions=40960,
)
QWEN3_4B = replace(QWEN3_8B, d_model=2560, d_ff=9728, tied_embeddings=True)
QWEN3_32B = replace(QWEN3_8B, d_model=5120, d_ff=25600, n_layers=64, n_heads=64)
QWEN3_30B_A3B = replace(
    QWEN3_8B,
    architecture="Qwen3MoeForCausalLM",
    d_model=2048,
    d_ff=768,
    n_layers=48,
    n_kv_heads=4,
    n_experts=128,
    experts_per_token=8,
    normalize_expert_weights=True,
)
REAL = {
    "qwen3-4b": QWEN3_4B,
    "qwen3-8b": QWEN3_8B,
    "qwen3-32b": QWEN3_32B,
    "qwen3-30b-a3b": QWEN3_30B_A3B,
}
TINY = replace(
    QWEN3_8B,
    vocab_size=512,
    d_model=64,
    d_ff=128,
    n_layers=2,
    n_heads=4,
    n_kv_heads=2,
    head_dim=16,
    tied_embeddings=True,
    max_positions=512,
)
# The model of the benchmarks' tables: four layers of width 256.
TINY_OF_BENCH = replace(
    TINY, vocab_size=2048, d_model=256, d_ff=768, n_layers=4, head_dim=64, max_positions=4096
)
