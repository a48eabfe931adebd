import json
import shutil

import pytest
from huggingface_hub import constants

from spmd_tx.coordinator.agent.base_model import find_config, find_model
from spmd_tx.demo import tiny_model
from spmd_tx.errors import StartError
from spmd_tx.models.checkpoint.index import INDEX_FILE
from tests.support.model_hub import ModelHub, serving

NAME = "owner/name"
SHARDS = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]


@pytest.fixture(scope="module")
def complete(tmp_path_factory):
    return tiny_model.write(tmp_path_factory.mktemp("complete"), tiny_model.PRESETS["tiny-gqa"])


@pytest.fixture
def model_dir(complete, tmp_path):
    """A copy that may be changed."""
    return shutil.copytree(complete, tmp_path / "model")


@pytest.fixture
def hub(tmp_path, monkeypatch):
    with serving(ModelHub()) as hub:
        place = "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "ENDPOINT", hub.url)
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", hub.url + place)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "token"))
        monkeypatch.delenv("HF_TOKEN", raising=False)
        yield hub


def refusal(find=find_model, name=NAME, revision=None):
    with pytest.raises(StartError) as refused:
        find(name, revision)
    return str(refused.value)


def test_a_model_in_the_cache_is_used_without_asking_the_hub(hub, complete):
    hub.push(NAME, complete)
    found = find_model(NAME)
    asked = hub.requests
    assert find_model(NAME) == found
    assert hub.requests == asked
    assert (found / "chat_template.jinja").is_file()


@pytest.mark.parametrize(
    "lost", [*SHARDS, "tokenizer.json", "config.json", INDEX_FILE, "generation_config.json"]
)
def test_a_half_downloaded_model_is_completed(hub, complete, lost):
    hub.push(NAME, complete)
    (find_model(NAME) / lost).unlink()
    hub.fetched.clear()
    assert (find_model(NAME) / lost).is_file()
    assert hub.files_of(NAME) in (
        [],
        [lost],
    )  # a file that is still among the cache's blobs is not sent again
