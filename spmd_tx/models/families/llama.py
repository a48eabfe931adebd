"""Llama 3 (Dubey et al. 2024), and Mistral, Ministral 3 and Qwen2, which differ from it in a few keys."""

from spmd_tx.models.declared.channels import Glu
from spmd_tx.models.declared.layers import LM_HEAD, Cycle, Layer, Model, Norm
from spmd_tx.models.declared.mixers import Softmax
from spmd_tx.models.families.keys import Keys
from spmd_tx.models.families.rope import read_rope

FIRST_THETA = {"rope_theta": 10000.0}  # of the first checkpoints, which do not say so


def llama(keys: Keys) -> Model:
    """Declare a LlamaForCausalLM."""
    biases = ("q", "k", "v", "o") if keys.get("attention_bias") else ()
    return _model(keys, biases, has_mlp_bias=bool(keys.get("mlp_bias")))


def mistral(keys: Keys) -> Model:
    """Declare a MistralForCausalLM or a Ministral3ForCausalLM.

    A model in which tokens see a window is served up to its length, where the window makes no difference.
    """
    return _model(keys, window=keys.get("sliding_window") or 0)


def qwen2(keys: Keys) -> Model:
    """Declare a Qwen2ForCausalLM."""
    keys.refuse(use_sliding_window=False)
    return _model(keys, ("q", "k", "v"))


def _model(keys: Keys, biases: tuple[str, ...] = (), *, has_mlp_bias: bool = False, window: int = 0) -> Model:
    keys = Keys({**FIRST_THETA, **keys.raw})
    keys.refuse(hidden_act="silu")
    sizes = keys.sizes()
    heads, kv_heads, width = sizes["n_heads"], sizes["n_kv_heads"], sizes["head_dim"]
    norm, rope = Norm(sizes["rms_norm_eps"]), read_rope(keys, width)
    mixer = Softmax(heads, kv_heads, width, rope, norm.eps, biases=biases)
    channel = Glu(keys.count("intermediate_size"), has_bias=has_mlp_bias)
    positions = rope.most_positions(sizes["max_positions"])
    return Model(
        architecture=sizes["architecture"],
        vocab_size=sizes["vocab_size"],
        d_model=sizes["d_model"],
        stack=(Cycle((Layer(mixer, channel, norm),), sizes["n_layers"]),),
        norm=norm,
        max_positions=min(positions, window) if window else positions,
        head=None if sizes["tied_embeddings"] else LM_HEAD,
    )
