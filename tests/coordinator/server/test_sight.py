"""Whether a model is served with images: by its files, and by what the operator asks for."""

import logging

import pytest

from spmd_tx.config import ServerConfig
from spmd_tx.coordinator.server.served_model import open_model
from spmd_tx.coordinator.server.worker_setup import make_setup
from spmd_tx.demo import tiny_model
from spmd_tx.errors import StartError
from spmd_tx.images.processor import FILES


@pytest.fixture(scope="module")
def seeing(tmp_path_factory):
    return tiny_model.write(tmp_path_factory.mktemp("model"), tiny_model.Spec(family="qwen3_5", sees=True))


def opened(path, tmp_path, **options):
    return open_model(ServerConfig(base_model=str(path), data_dir=tmp_path, **options))


def test_a_model_that_sees_takes_images_unless_the_operator_wants_text_alone(seeing, tmp_path):
    assert opened(seeing, tmp_path).images is not None
    assert opened(seeing, tmp_path, image_tokens=0).images is None


def test_without_its_processor_a_model_takes_text_alone_unless_images_are_asked_for(tmp_path, caplog):
    path = tiny_model.write(tmp_path / "model", tiny_model.Spec(family="qwen3_5", sees=True))
    for name in FILES:
        (path / name).unlink(missing_ok=True)
    with caplog.at_level(logging.WARNING):
        assert opened(path, tmp_path).images is None
    assert f"takes text alone: {path} has no {FILES[0]}" in caplog.text
    with pytest.raises(StartError, match=f"has no {FILES[0]}"):
        opened(path, tmp_path, image_tokens=1024)


@pytest.mark.parametrize(
    "options, tokens",
    [({}, None), ({"full_parameters": True}, None), ({"image_tokens": 0}, 0), ({"image_tokens": 300}, 300)],
)
def test_workers_are_told_what_was_asked_for(options, tokens):
    config = ServerConfig(base_model="tiny", **options).with_mesh((1, 1, 1))
    assert make_setup(config, None, 64, "shared-outer").image_tokens == tokens
