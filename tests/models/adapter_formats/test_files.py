from dataclasses import replace

import pytest

from spmd_tx.demo import tiny_families, tiny_model
from spmd_tx.models.adapter_formats.files import group_of_module, modules, spelling
from spmd_tx.models.declared.model import EXPERT_LORA
from spmd_tx.models.families.registry import declare
from spmd_tx.protocol.commands import AdapterSpec

FLAGS = {"train_attn": "attn", "train_mlp": "mlp", "train_unembed": "unembed"}


@pytest.mark.parametrize("layout", EXPERT_LORA)
@pytest.mark.parametrize("family", tiny_families.FAMILIES)
def test_names_of_all_families_tell_factors_apart_and_what_trains_them(family, layout):
    spec = replace(tiny_model.PRESETS["tiny"], family=family)
    model = replace(declare(tiny_model.model_config(spec, {})), expert_lora=layout)
    names = [name for module in modules(AdapterSpec(rank=4), model) for name in module.shapes]
    assert len({spelling(name) for name in names}) == len(names)
    for flag, group in FLAGS.items():
        adapter = AdapterSpec(rank=4, **{other: other == flag for other in FLAGS})
        found = [module.name for module in modules(adapter, model)]
        assert found
        assert {group_of_module(name) for name in found} == {group}
        assert {group_of_module(name.rpartition(".")[2]) for name in found} == {group}
