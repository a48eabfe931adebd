"""Adapters have as many parameters as the cookbook says of hosted models: of each whose family is served."""

import json

import pytest

from spmd_tx.models.families.registry import declare
from tests.cookbook.cookbook import PYTHON, run_python
from tests.support.known_models import ALIKE, CONFIGS, HOSTED
from tests.support.model_shapes import adapter_numbers

pytestmark = pytest.mark.cookbook

TABLE = "from tinker_cookbook.hyperparam_utils import _LORA_PARAMS_PER_RANK_BY_COMPONENT as table"
PRINT = f"import json; {TABLE}; print('TABLE' + json.dumps(table))"
# Of sparse attention, and of families that are not served.
NOT_SERVED = (
    "deepseek-ai/DeepSeek-V4",
    "moonshotai/Kimi-K3",
    "nvidia/",
    "thinkingmachines/",
)
NOT_SERVED += ("zai-org/GLM-5",)


def test_every_hosted_model_of_a_served_family_has_the_parameters_of_the_cookbooks_table(environment):
    table = json.loads(run_python(environment, [PYTHON, "-c", PRINT]).partition("TABLE")[2])
    models, served = CONFIGS | HOSTED, 0
    for name, counts in table.items():
        if name.startswith(NOT_SERVED):
            continue
        like = ALIKE.get(name) or name
        assert adapter_numbers(declare(models[like])) == counts, name
        served += 1
    print(f"{served} of {len(table)} hosted models are served, with the same counts")
    assert served >= 32
