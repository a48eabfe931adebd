import numpy as np

from tools.bench.float32 import errors


def test_errors_are_parts_of_the_largest_number_and_other_tokens_are_counted():
    on_cpus = {"losses": np.array([1.0, -4.0]), "tokens": np.array([3, 5, 7, 9]), "nothing": np.zeros(2)}
    here = on_cpus | {"losses": np.array([1.002, -4.0]), "tokens": np.array([3, 5, 7, 8])}
    found = dict(errors(here, on_cpus))
    assert abs(found["losses"] - 0.0005) < 1e-9
    assert found["tokens"] == 0.25
    assert found["nothing"] == 0
