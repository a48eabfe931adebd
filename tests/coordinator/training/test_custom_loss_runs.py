from spmd_tx.bounds import Bounds
from spmd_tx.coordinator.training.custom_loss_runs import loss_limits
from spmd_tx.custom_loss.limits import LossLimits


def test_the_bounds_on_custom_losses_are_those_that_workers_are_told():
    bounds = Bounds(
        custom_loss_datum_operations=1,
        custom_loss_operations=2,
        custom_loss_programs=3,
        custom_loss_compile_seconds=4.0,
        custom_loss_run_seconds=5.0,
    )
    assert loss_limits(bounds) == LossLimits(
        operations_per_datum=1, operations=2, programs=3, compile_seconds=4.0, run_seconds=5.0
    )
