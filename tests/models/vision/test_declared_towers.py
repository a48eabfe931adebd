"""What config.json says of a vision tower is followed, or refused with its key and value."""

import pytest

from spmd_tx.demo.tiny_families import stored_shapes
from spmd_tx.models.declared.tower import Tower
from spmd_tx.models.families.keys import Refusal
from spmd_tx.models.families.registry import declare
from tests.golden.vision_cases import CONFIGS, D_MODEL


def changed(name, part, **keys):
    return CONFIGS[name] | {part: CONFIGS[name][part] | keys}


def test_the_tower_is_declared_as_config_json_says():
    sizes = {"depth": 3, "width": 32, "inner": 48, "heads": 2, "side": 12, "out": D_MODEL}
    assert declare(CONFIGS["qwen3_5"]).tower == Tower(**sizes)
    assert declare(CONFIGS["qwen3_vl_moe"]).tower == Tower(**sizes, deep=(0, 2))


def test_a_model_without_a_vision_config_has_no_tower_and_places_text_only():
    model = declare({key: value for key, value in CONFIGS["qwen3_5"].items() if key != "vision_config"})
    assert model.tower is None
    assert model.attention.rope.sections == ()


def test_the_first_layers_add_the_planes_of_images():
    model = declare(CONFIGS["qwen3_vl"])
    assert [layer.adds_image for layer in model.layers] == [True, True, False, False]
    assert model.attention.rope.sections == (4, 2, 2)
    assert not any(layer.adds_image for layer in declare(CONFIGS["qwen3_5_moe"]).layers)


def test_tensors_of_released_towers_are_those_that_are_declared():
    """Names and shapes as the files of Qwen3-VL-8B have them: 27 blocks of 12 tensors, 3 deep mergers."""
    tower = Tower(27, 1152, 4304, 16, 48, 4096, (8, 16, 24))
    vision = {"hidden_size": 1152, "depth": 27, "intermediate_size": 4304, "num_heads": 16}
    vision |= {"num_position_embeddings": 2304, "deepstack_visual_indexes": [8, 16, 24]}
    raw = changed("qwen3_vl", "vision_config", **vision, out_hidden_size=4096)
    raw["text_config"] = raw["text_config"] | {"hidden_size": 4096}
    assert declare(raw).tower == tower
    shapes = {name: shape for name, shape in stored_shapes(declare(raw)).items() if ".visual." in name}
    assert len(shapes) == 27 * 12 + 3 * 6 + 3 + 6
    assert shapes["model.visual.patch_embed.proj.weight"] == (1152, 3, 2, 16, 16)
    assert shapes["model.visual.blocks.26.attn.qkv.weight"] == (3456, 1152)
    assert shapes["model.visual.merger.norm.weight"] == (1152,)
    assert shapes["model.visual.deepstack_merger_list.2.norm.bias"] == (4608,)
    assert shapes["model.visual.deepstack_merger_list.2.linear_fc2.weight"] == (4096, 4608)


@pytest.mark.parametrize(
    "name, change, message",
    [
        ("qwen3_5", {"patch_size": 14}, "patch_size of its vision_config to 14"),
        ("qwen3_5", {"spatial_merge_size": 4}, "spatial_merge_size"),
        ("qwen3_5", {"hidden_act": "silu"}, "supported is 'gelu_pytorch_tanh'"),
        ("qwen3_5", {"out_hidden_size": 64}, "out_hidden_size of its vision_config to 64"),
        ("qwen3_5", {"num_heads": 3}, "3 num_heads for a hidden_size of 32"),
        ("qwen3_5", {"num_heads": 16}, "16 num_heads for a hidden_size of 32"),
        ("qwen3_5", {"num_position_embeddings": 145}, "must be the square of an integer"),
        (
            "qwen3_5",
            {"deepstack_visual_indexes": [0]},
            r"to \[0\], which is not supported; supported is \[\]",
        ),
        ("qwen3_vl", {"deepstack_visual_indexes": None}, "lacks the key 'deepstack_visual_indexes'"),
        ("qwen3_vl", {"deepstack_visual_indexes": [0, 3]}, "blocks, ascending, of the 3 that there are"),
        ("qwen3_vl", {"deepstack_visual_indexes": [2, 0]}, "ascending"),
    ],
    ids=str,
)
def test_towers_of_other_kinds_are_refused(name, change, message):
    with pytest.raises(Refusal, match=message):
        declare(changed(name, "vision_config", **change))


@pytest.mark.parametrize(
    "change, message",
    [
        ({"mrope_interleaved": False}, "mrope_interleaved of its rotary embedding to False"),
        ({"mrope_section": [4, 2]}, "must be three integers whose sum is 8"),
        ({"mrope_section": [4, 2, 3]}, r"to \[4, 2, 3\], which must be three integers whose sum is 8"),
        ({"mrope_section": None}, "lacks the key 'mrope_section' of its rotary embedding"),
    ],
    ids=str,
)
def test_positions_of_other_kinds_are_refused(change, message):
    rope = CONFIGS["qwen3_vl"]["text_config"]["rope_parameters"]
    with pytest.raises(Refusal, match=message):
        declare(changed("qwen3_vl", "text_config", rope_parameters=rope | change))


def test_qwen3_vl_without_a_text_config_or_with_too_few_layers_is_refused():
    flat = CONFIGS["qwen3_vl"]["text_config"] | {"architectures": CONFIGS["qwen3_vl"]["architectures"]}
    with pytest.raises(Refusal, match="lacks the key 'text_config'"):
        declare(flat)
    with pytest.raises(Refusal, match="2 deepstack_visual_indexes, more than its 1 layers"):
        declare(changed("qwen3_vl", "text_config", num_hidden_layers=1))
