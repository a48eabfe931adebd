import json

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
        StartError, match=r"model.safetensors is 13 bytes here and 7 bytes there; give --base-model"
    ):
        check_same(here, expected)
    here = write_model(tmp_path / "here")
    (here / "config.json").write_text('{"hidden_size": 1}')
    with pytest.raises(StartError, match=r"config.json is [0-9a-f]+ here and [0-9a-f]+ there"):
        check_same(here, expected)


def test_another_number_of_files_is_another_model(tmp_path):
    expected = fingerprint(write_model(tmp_path / "there"))
    here = write_model(tmp_path / "here")
    (here / "part.safetensors").write_text("part")
    (here / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"w": "part.safetensors"}}))
    with pytest.raises(StartError, match=r"model.safetensors is absent here and 7 bytes there"):
        check_same(here, expected)


def test_a_directory_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(StartError, match="nowhere is not a complete model: No such file or directory"):
        check_same(tmp_path / "nowhere", {})
