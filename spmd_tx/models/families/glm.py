"""GLM-4.5 and 4.6 (GLM-4.5 Team 2025): attention with grouped queries, and DeepSeek-V3's mixture."""

from spmd_tx.models.declared.model import Model
from spmd_tx.models.families.decoder import read_sizes
from spmd_tx.models.families.deepseek import further, mtp, stack
from spmd_tx.models.families.keys import ConfigKeys
from spmd_tx.models.families.rope import read_rope


def mixture(keys: ConfigKeys) -> Model:
    """Declare a Glm4MoeForCausalLM. Half of each head is rotated unless config.json says otherwise."""
    keys.only(hidden_act="silu")
    sizes = read_sizes(keys)
    rope = read_rope(keys, sizes.head_width, share=0.5)
    biases = ("q", "k", "v") if keys.flag("attention_bias") else ()
    mixer = sizes.attention(rope, qk_norm=keys.flag("use_qk_norm"), biases=biases)
    kind = keys, mixer, sizes.norm
    return sizes.model(stack(*kind), rope, further=further(keys), mtp=mtp(*kind))
