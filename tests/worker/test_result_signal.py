import select

import jax.numpy as jnp
import numpy as np

from spmd_tx.worker.result_signal import ResultSignal, is_complete

SECONDS = 30.0  # until a test that waits for a thread gives up


def can_be_read(signal):
    return bool(select.select([signal], [], [], SECONDS)[0])


def until_over(signal):
    assert can_be_read(signal)
    while not signal.is_over():
        assert can_be_read(signal)


def test_it_is_over_when_all_that_was_waited_for_is_there():
    with ResultSignal() as signal:
        for count in (1, 3):  # those of earlier that nobody has asked about do not count
            for _ in range(count):
                signal.wait_for(({"tokens": jnp.ones(8) + 1}, {}))
            until_over(signal)
            assert signal.is_over()


def test_a_result_that_cannot_be_computed_is_over_too():
    broken = jnp.ones(8)
    with ResultSignal() as signal:
        broken.delete()
        signal.wait_for(({"tokens": broken}, {}))
        until_over(signal)
        signal.wait_for(({"tokens": jnp.ones(8)}, {}))
        until_over(signal)


def test_a_result_without_arrays_of_devices_is_complete():
    assert is_complete(({"tokens": np.ones(3)}, {"grad_norm": 1.0}))
    with ResultSignal() as signal:
        signal.wait_for(({}, {}))
        until_over(signal)
