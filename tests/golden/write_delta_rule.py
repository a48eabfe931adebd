"""Writes transformers_delta_rule.npz. Needs torch: python -m tests.golden.write_delta_rule"""

import numpy as np
import torch
from transformers.models.qwen3_5 import modeling_qwen3_5 as theirs
from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5TextConfig

from spmd_tx.models.families import qwen3_5
from spmd_tx.models.families.keys import ConfigKeys
from tests.golden import delta_cases as cases
from tests.golden import delta_model
from tests.golden.delta_cases import NUMBERS, SIZES


def tensor(array: np.ndarray, *, grad: bool = False) -> torch.Tensor:
    return torch.from_numpy(array)[None].requires_grad_(grad)


def rule() -> dict[str, np.ndarray]:
    inputs = {name: tensor(array, grad=True) for name, array in cases.rule_inputs().items()}
    q, k, v, decay, strength = inputs.values()
    options = {"output_final_state": True, "use_qk_l2norm_in_kernel": True}
    result, memory = theirs.torch_chunk_gated_delta_rule(q, k, v, g=decay, beta=strength, **options)
    result.backward(tensor(cases.rule_slope()))
    arrays = {f"rule/grad_{name}": x.grad[0].numpy() for name, x in inputs.items()}
    return {"rule/result": result[0].detach().numpy(), "rule/memory": memory[0].detach().numpy(), **arrays}


def config() -> Qwen3_5TextConfig:
    return Qwen3_5TextConfig(
        hidden_size=cases.D_MODEL,
        num_hidden_layers=2,
        layer_types=["linear_attention", "full_attention"],
        num_attention_heads=cases.HEADS,
        num_key_value_heads=cases.KV_HEADS,
        head_dim=cases.HEAD_DIM,
        linear_num_key_heads=SIZES.k_heads,
        linear_num_value_heads=SIZES.v_heads,
        linear_key_head_dim=SIZES.k_width,
        linear_value_head_dim=SIZES.v_width,
        linear_conv_kernel_dim=SIZES.taps,
        rms_norm_eps=cases.EPS,
        rope_parameters={
            "rope_type": "default",
            "rope_theta": cases.THETA,
            "partial_rotary_factor": cases.ROTATED / cases.HEAD_DIM,
            "mrope_section": [1, 1, 0],
            "mrope_interleaved": True,
        },
        attn_implementation="eager",
    )


def layer() -> dict[str, np.ndarray]:
    w = {name: torch.from_numpy(array) for name, array in cases.layer_weights().items()}
    module = theirs.Qwen3_5GatedDeltaNet(config(), 0).float()
    module.load_state_dict(
        {
            "in_proj_qkv.weight": torch.cat([w["q"], w["k"], w["v"]], dim=1).T,
            "in_proj_z.weight": w["z"].T,
            "in_proj_a.weight": w["a"].T,
            "in_proj_b.weight": w["b"].T,
            "out_proj.weight": w["out"].T,
            "conv1d.weight": w["taps"],
            "A_log": w["a_log"],
            "dt_bias": w["dt_bias"],
            "norm.weight": w["norm"],
        }
    )
    x = tensor(cases.layer_input(), grad=True)
    result = module(x)
    result.backward(tensor(cases.layer_slope()))
    return {"layer/result": result[0].detach().numpy(), "layer/grad_input": x.grad[0].numpy()}


def attention() -> dict[str, np.ndarray]:
    w = {name: torch.from_numpy(array) for name, array in cases.attention_weights().items()}
    module = theirs.Qwen3_5Attention(config(), 1).float()
    names = {name: f"{name}_proj.weight" for name in "qkvo"}
    state = {names[name]: w[name].T for name in "qkvo"}
    module.load_state_dict(state | {f"{name}_norm.weight": w[f"{name}_norm"] for name in "qk"})
    x = tensor(cases.layer_input(), grad=True)
    positions = torch.arange(cases.LENGTH)[None, None].expand(3, 1, -1)
    where = theirs.Qwen3_5TextRotaryEmbedding(config())(x, positions)
    mask = torch.full((cases.LENGTH, cases.LENGTH), float("-inf")).triu(1)[None, None]
    result = module(x, where, mask)[0]
    result.backward(tensor(cases.layer_slope()))
    return {"attention/result": result[0].detach().numpy(), "attention/grad_input": x.grad[0].numpy()}


def logits() -> dict[str, np.ndarray]:
    """Add the adapter to the weights, and run the text model."""
    weights = delta_model.tensors()
    declared = qwen3_5.dense(ConfigKeys(delta_model.CONFIG))
    for name, adapted in declared.adapted.items():
        numbers, source = adapted.numbers or range(1), adapted.map.source
        a, b = delta_model.factors(name, len(numbers), adapted.map.width_in, adapted.map.width_out)
        for index, layer in enumerate(numbers):
            stored = weights[source.name.format(layer=layer)]
            first, last, step = source.rows or (0, len(stored), 1)
            stored[first:last:step] += delta_model.SCALE * b[index].T @ a[index]
    config = Qwen3_5TextConfig(**delta_model.TEXT, attn_implementation="eager")
    module = theirs.Qwen3_5ForCausalLM(config).float().eval()
    named = {name.replace("language_model.", ""): torch.from_numpy(x) for name, x in weights.items()}
    module.load_state_dict(named)
    arrays = {}
    for number, tokens in enumerate(delta_model.sequences()):
        with torch.no_grad():
            answer = module(torch.from_numpy(tokens.astype(np.int64))[None]).logits[0]
        arrays[f"logits/{number}"] = answer[delta_model.rows_of(len(tokens))].numpy()
    return arrays


if __name__ == "__main__":
    np.savez_compressed(NUMBERS, **rule(), **layer(), **attention(), **logits())
