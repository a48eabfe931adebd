import pytest

from spmd_tx.models.adapter_formats.selection import Selection

Q0, Q1, UP = ("layers.0.self_attn.q_proj",), ("layers.1.self_attn.q_proj",), ("layers.1.mlp.up_proj",)


@pytest.mark.parametrize(
    "targets, parameters, excluded, layers, lists, wanted",
    [
        (None, None, None, None, None, [None, None, None]),
        ("all-linear", None, None, None, None, [None, None, None]),
        (["all-linear"], None, None, [0], None, [None, *["layers_to_transform"] * 2]),
        ("all-linear", None, None, [0], None, [None, *["layers_to_transform"] * 2]),
        (["q_proj"], None, None, None, None, [None, None, "target_modules"]),
        (["q_proj"], ["mlp.up_proj.weight"], None, None, None, [None, None, None]),
        ([], ["mlp.up_proj.weight"], None, None, None, ["target_modules", "target_modules", None]),
        (
            ["q_proj"],
            None,
            ["layers.0.self_attn.q_proj"],
            None,
            None,
            ["exclude_modules", None, "target_modules"],
        ),
        (["q_proj"], None, r"layers\.1\..*", None, None, [None, "exclude_modules", "exclude_modules"]),
        (None, None, None, 1, None, ["layers_to_transform", None, None]),
        (None, None, None, [1], ["blocks"], ["layers_to_transform"] * 3),
        (None, None, None, [1], "layers", ["layers_to_transform", None, None]),
        (r".*q_proj", None, None, [1], None, [None, None, "target_modules"]),
        (["proj"], None, None, None, None, ["target_modules"] * 3),
    ],
)
def test_a_field_leaves_a_module_out_as_in_peft(targets, parameters, excluded, layers, lists, wanted):
    selection = Selection(targets, parameters, excluded, layers, lists)
    assert [selection.left_out_by(names) for names in (Q0, Q1, UP)] == wanted


def test_a_module_is_selected_by_any_of_its_names():
    selection = Selection(["model.unembed_tokens"], None, None, None, None)
    assert selection.left_out_by(("lm_head", "model.unembed_tokens")) is None
    assert selection.left_out_by(("lm_head",)) == "target_modules"


def test_of_a_module_that_the_base_model_has_not_the_layer_counts_alone():
    selection = Selection(["gate_proj"], None, None, [1], None)
    assert selection.left_out_by(("model.layers.1.mlp.experts.w1",), is_alike=False) is None
    assert selection.left_out_by(("model.layers.0.mlp.experts.w1",), is_alike=False) == "layers_to_transform"
