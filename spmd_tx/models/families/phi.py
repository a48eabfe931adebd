"""Phi-3 and Phi-4 (Abdin et al. 2024), a Llama whose checkpoints fuse maps.

Queries, keys and values lie one behind the other in one matrix, and gate and up in another.
"""

from dataclasses import replace

from spmd_tx.models.declared.channels import Glu
from spmd_tx.models.declared.layers import Cycle
from spmd_tx.models.declared.mixers import Softmax
from spmd_tx.models.declared.model import Model
from spmd_tx.models.declared.rope import LongRope
from spmd_tx.models.families.keys import ConfigKeys
from spmd_tx.models.families.llama import mistral


def phi3(keys: ConfigKeys) -> Model:
    """Declare a Phi3ForCausalLM. One in which tokens see a window is served up to its length, as Mistral.

    One with longrope is served up to the positions that it was trained with first.
    """
    keys.only(attention_bias=False)
    model = mistral(keys)
    (layer,) = model.stack[0].layers
    assert isinstance(layer.mixer, Softmax)
    assert isinstance(layer.channel, Glu)
    if layer.mixer.rope is not None and not isinstance(layer.mixer.rope.scaling, LongRope | None):
        raise keys.wrong("rope_scaling", ", which must be of the type longrope, or none")
    fused = replace(
        layer,
        mixer=replace(layer.mixer, fused="qkv_proj"),
        channel=replace(layer.channel, fused="gate_up_proj"),
    )
    return replace(model, stack=(Cycle((fused,), model.n_layers),))
