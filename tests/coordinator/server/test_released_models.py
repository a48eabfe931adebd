"""Every family starts from the repository of its release, of which it downloads what it needs, once."""

import json

import jax
import jax.numpy as jnp
import pytest

from spmd_tx.cli import plan
from spmd_tx.config import ServerConfig
from spmd_tx.coordinator.server.served_model import open_model
from spmd_tx.coordinator.text.model_text import load_model_text
from spmd_tx.demo.tiny_families import FAMILIES
from spmd_tx.errors import InvalidRequest, StartError
from spmd_tx.models.base_weights import weights
from spmd_tx.models.checkpoint.files import Files
from spmd_tx.models.checkpoint.tensors import check
from spmd_tx.sharding.mesh import make_mesh
from tests.support.model_hub import ModelHub, lead_to, serving
from tests.support.released_models import RELEASES, needed, write_release

TEXT = "Hello, wörld: 12345\n\n  世界 don't </s> 👩‍👧"
HELLO = [{"role": "user", "content": "Hello"}]


@pytest.fixture
def hub(tmp_path, monkeypatch):
    with serving(ModelHub()) as hub:
        lead_to(hub, monkeypatch, tmp_path / "cache")
        yield hub


def test_every_family_has_a_release():
    assert {release.family for release in RELEASES.values()} == set(FAMILIES), (
        "tests/support/released_models.py: add a release of the family to RELEASES"
    )


@pytest.mark.parametrize("name", RELEASES)
def test_a_release_is_served(hub, tmp_path, name):
    release, repository = RELEASES[name], write_release(tmp_path / "repository", name)
    hub.push(name, repository)
    model = open_model(ServerConfig(base_model=name, data_dir=tmp_path / "data"))
    assert sorted(hub.files_of(name)) == sorted(needed(repository, name))

    declared = weights(model.config, make_mesh(1, 1, 1), jnp.float32)
    check(Files(model.directory), jax.tree.leaves(declared), model.config.unread)

    text = load_model_text(model.directory)
    tokens = text.tokenizer.encode(TEXT, add_special_tokens=False).ids
    assert max(tokens) < model.config.vocab_size
    assert text.tokenizer.decode(tokens, skip_special_tokens=False) == TEXT
    assert [text.tokenizer.id_to_token(number) for number in text.eos_token_ids] == list(release.ends)
    if release.template == "none":
        with pytest.raises(InvalidRequest, match="this model has no chat template; use /completions"):
            text.template.render(HELLO, {}, 1000, 10.0)
    else:
        assert "user\nHello" in text.template.render(HELLO, {}, 1000, 10.0)


def test_the_revision_of_the_options_is_what_is_served(hub, tmp_path):
    name = "Qwen/Qwen3-8B"
    old = hub.push(name, write_release(tmp_path / "old", name), "v1")
    newer = write_release(tmp_path / "newer", name)
    (newer / "tokenizer_config.json").write_text('{"chat_template": "newer {{ messages }}"}')
    hub.push(name, newer)
    config = ServerConfig(base_model=name, revision="v1", data_dir=tmp_path / "data")
    model = open_model(config)
    assert (model.commit, model.directory.name) == (old, old)
    assert "newer" not in load_model_text(model.directory).template.render(HELLO, {}, 1000, 10.0)
    assert plan.read_model(config).vocab_size == model.config.vocab_size
    main = open_model(ServerConfig(base_model=name, data_dir=tmp_path / "data"))
    assert main.commit is None
    assert "newer" in load_model_text(main.directory).template.render(HELLO, {}, 1000, 10.0)


def test_of_a_model_that_is_not_served_no_weights_are_downloaded(hub, tmp_path):
    name = "Qwen/Qwen3-8B"
    repository = write_release(tmp_path / "repository", name)
    config = json.loads((repository / "config.json").read_text())
    (repository / "config.json").write_text(json.dumps(config | {"architectures": ["OtherForCausalLM"]}))
    hub.push(name, repository)
    with pytest.raises(StartError, match="holds a OtherForCausalLM"):
        open_model(ServerConfig(base_model=name, data_dir=tmp_path / "data"))
    assert hub.files_of(name) == ["config.json"]
