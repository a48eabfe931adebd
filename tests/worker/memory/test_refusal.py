"""Which meshes a refusal may propose."""

from dataclasses import replace

import pytest

from spmd_tx.models.families.registry import declare
from spmd_tx.worker.memory.refusal import splits_evenly
from tests.support.known_models import CONFIGS

FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}


@pytest.mark.parametrize(
    "name, quantization, sizes",
    [
        ("openai/gpt-oss-20b", {"quant_method": "mxfp4"}, [2]),  # 90 groups of an expert's inner width
        ("deepseek-ai/DeepSeek-V3.1", FP8, [2, 4, 8, 16]),  # 16 of them
    ],
)
def test_no_tp_is_proposed_that_cuts_groups_of_packed_experts(name, quantization, sizes):
    model = declare(CONFIGS[name] | {"quantization_config": quantization})
    packed = replace(model, packs_experts=True)
    assert [tp for tp in (2, 4, 8, 16, 32) if splits_evenly(packed, tp)] == sizes


def test_no_tp_is_proposed_that_cuts_the_dense_layers_before_a_mixture():
    model = declare(CONFIGS["zai-org/GLM-4.5-Air"] | {"intermediate_size": 10950})
    assert [tp for tp in (2, 4, 8) if splits_evenly(model, tp)] == [2]
