"""GLM-4.5 and 4.6 (GLM-4.5 Team 2025): attention with grouped queries, and DeepSeek-V3's mixture."""

from spmd_tx.models.declared.layers import Norm
from spmd_tx.models.declared.mixers import Softmax
from spmd_tx.models.declared.model import Model
from spmd_tx.models.families.deepseek import further, mtp, stack
from spmd_tx.models.families.keys import ConfigKeys
from spmd_tx.models.families.rope import read_rope


def mixture(keys: ConfigKeys) -> Model:
    """Declare a Glm4MoeForCausalLM. Half of each head is rotated unless config.json says otherwise."""
    keys.only(hidden_act="silu")
    sizes = keys.sizes()
    eps, width = sizes["rms_norm_eps"], sizes["head_dim"]
    rope = read_rope(keys, width, share=0.5)
    mixer = Softmax(
        sizes["n_heads"],
        sizes["n_kv_heads"],
        width,
        rope,
        eps,
        qk_norm=keys.flag("use_qk_norm"),
        biases=("q", "k", "v") if keys.flag("attention_bias") else (),
    )
    return Model(
        architecture=sizes["architecture"],
        vocab_size=sizes["vocab_size"],
        d_model=sizes["d_model"],
        stack=stack(keys, mixer, Norm(eps)),
        norm=Norm(eps),
        max_positions=rope.most_positions(sizes["max_positions"]),
        is_tied=sizes["tied_embeddings"],
        further=further(keys),
        mtp=mtp(keys, mixer, Norm(eps)),
    )
