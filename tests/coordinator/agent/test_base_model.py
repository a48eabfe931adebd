import json

import numpy as np
import pytest

from spmd_tx.coordinator.agent.base_model import check_same, fingerprint
from spmd_tx.errors import StartError
from tests.coordinator.mesh.worker_group import write_model


def test_copies_of_a_model_are_the_same(tmp_path):
    check_same(write_model(tmp_path / "here"), fingerprint(write_model(tmp_path / "there")))


def test_what_differs_is_named(tmp_path):
    expected = fingerprint(write_model(tmp_path / "there"))
    here = write_model(tmp_path / "here", weights="other weights")
    with pytest.raises(
        StartError,
        match=r"model.safetensors is [0-9a-f]+ of 13 bytes here and [0-9a-f]+ of 7 bytes there; give",
    ):
        check_same(here, expected)
    here = write_model(tmp_path / "here")
    (here / "config.json").write_text('{"hidden_size": 1}')
    with pytest.raises(StartError, match=r"config.json is [0-9a-f]+ here and [0-9a-f]+ there"):
        check_same(here, expected)


def test_other_weights_of_the_same_size_are_another_model(tmp_path):
    content = np.random.default_rng(0).bytes(3_000_000)
    here, there = (write_model(tmp_path / place, weights="") for place in ("here", "there"))
    for folder in (here, there):
        (folder / "model.safetensors").write_bytes(content)
    check_same(here, fingerprint(there))
    trained = np.frombuffer(content, np.uint8) ^ (np.arange(len(content)) % 1000 == 0)  # a few of all bits
    (here / "model.safetensors").write_bytes(trained.astype(np.uint8).tobytes())
    with pytest.raises(StartError, match=r"of 3000000 bytes here and [0-9a-f]+ of 3000000 bytes there"):
        check_same(here, fingerprint(there))


def test_another_number_of_files_is_another_model(tmp_path):
    expected = fingerprint(write_model(tmp_path / "there"))
    here = write_model(tmp_path / "here")
    (here / "model.safetensors").rename(here / "part.safetensors")
    (here / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"w": "part.safetensors"}}))
    with pytest.raises(StartError, match=r"model.safetensors is absent here and [0-9a-f]+ of 7 bytes there"):
        check_same(here, expected)


def test_a_single_file_goes_before_an_index_that_an_earlier_save_left(tmp_path):
    expected = fingerprint(write_model(tmp_path / "there"))
    here = write_model(tmp_path / "here")
    (here / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"w": "gone.safetensors"}}))
    check_same(here, expected)


def test_a_directory_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(StartError, match="nowhere is not a complete model: No such file or directory"):
        check_same(tmp_path / "nowhere", {})
