import numpy as np
import pytest

from spmd_tx.worker.custom_loss import CustomLosses
from tests.custom_loss.recorded import losses, operations, recorded

pytestmark = pytest.mark.filterwarnings("error")


@pytest.fixture(scope="module")
def custom_losses():
    return CustomLosses()


def run(custom_losses, case, data=None):
    names = [each["name"] for each in case.definition["inputs"]]
    return custom_losses.run(case.body, [[datum[name] for name in names] for datum in data or case.data])


@pytest.mark.parametrize("name", [*losses(), *operations()])
def test_loss_metrics_and_gradient_are_those_of_torch(custom_losses, name):
    case = recorded()[name]
    results = run(custom_losses, case)
    np.testing.assert_allclose(results.losses_D, case.losses, rtol=1e-5, atol=1e-5)
    for place, metrics in enumerate(case.metrics):
        np.testing.assert_allclose(results.metrics_DM[place], list(metrics.values()), rtol=1e-5, atol=1e-5)
    for gradient, expected in zip(results.gradients, case.gradients, strict=True):
        np.testing.assert_allclose(gradient, expected, rtol=1e-5, atol=1e-5)
