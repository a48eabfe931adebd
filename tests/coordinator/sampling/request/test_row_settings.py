import numpy as np

from spmd_tx.coordinator.sampling.request.row_settings import of_nobody, row_settings, settings_columns

STOPS = [3, 5, *[-1] * 6]


def test_rows_are_columns_of_a_decode():
    largest = 2**32 - 1
    columns = settings_columns((row_settings((largest, 7), 0.5, 40, 0.9, STOPS), of_nobody(97)))
    assert columns["seeds"].tolist() == [[largest, 7], [0, 0]]
    assert columns["temperatures"].tolist() == [0.5, 1.0]
    assert columns["top_k"].tolist() == [40, 97]
    assert columns["top_p"].tolist() == [np.float32(0.9), 1.0]
    assert columns["stop_tokens"].tolist() == [STOPS, [-1] * 8]
    assert [column.dtype for column in columns.values()] == [np.uint32, "f4", "i4", "f4", "i4"]
