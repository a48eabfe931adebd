import importlib
import logging
import re
import shutil

import pytest
from huggingface_hub import constants

from spmd_tx.byte_sizes import parse_size, show_size
from spmd_tx.coordinator.agent import download_news, layout
from spmd_tx.coordinator.agent.base_model import find_config, find_model
from spmd_tx.demo import tiny_model
from spmd_tx.errors import StartError
from spmd_tx.models.checkpoint.index import INDEX_FILE, SINGLE_FILE
from tests.support.model_hub import ModelHub, lead_to, serving

NAME = "owner/name"
SHARDS = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
NEEDED = [
    *("chat_template.jinja", "config.json", "generation_config.json", *SHARDS, INDEX_FILE),
    *("tokenizer.json", "tokenizer_config.json"),
]


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
        lead_to(hub, monkeypatch, tmp_path / "cache")
        yield hub


def refusal(find=find_model, name=NAME, revision=None):
    with pytest.raises(StartError) as refused:
        find(name, revision)
    return str(refused.value)


def test_what_the_library_says_is_logged_once():
    importlib.import_module("spmd_tx.coordinator.agent.hub")
    assert not logging.getLogger("huggingface_hub").handlers


def test_a_model_in_the_cache_is_used_without_asking_the_hub(hub, complete):
    hub.push(NAME, complete)
    found = find_model(NAME)
    asked = hub.requests
    assert find_model(NAME) == found
    assert find_config(NAME) == found
    assert hub.requests == asked
    assert sorted(hub.files_of(NAME)) == NEEDED


def test_a_download_says_how_much_of_a_file_has_come(hub, tmp_path, monkeypatch, capfd):
    single = tiny_model.write(tmp_path / "single")
    weights = (single / SINGLE_FILE).stat().st_size
    hub.push(NAME, single)
    hub.goes_on.clear()
    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", weights // 16)  # bytes that are written at once
    monkeypatch.setattr(download_news, "FIRST_SECONDS", 0.01)
    monkeypatch.setattr(download_news, "NEXT_SECONDS", 0.01)
    whole, partly = show_size(weights), list[float]()

    def report(line):
        if come := re.fullmatch(rf"(.+) of {whole} of {NAME} downloaded, .+ a second", line):
            partly.append(parse_size(come[1], 0) / weights)
        if partly and partly[-1] > 0.4:
            hub.goes_on.set()

    found = find_model(NAME, None, report)
    assert (found / SINGLE_FILE).read_bytes() == (single / SINGLE_FILE).read_bytes()
    assert any(0.4 < part < 0.51 for part in partly)
    assert partly == sorted(partly)
    assert "%" not in capfd.readouterr().err  # no bars beside the lines


@pytest.mark.parametrize(
    "lost", [*SHARDS, "tokenizer.json", "config.json", INDEX_FILE, "generation_config.json"]
)
def test_a_half_downloaded_model_is_completed(hub, complete, lost):
    hub.push(NAME, complete)
    link = find_model(NAME) / lost
    link.resolve().unlink()  # what an interrupted download leaves: no blob, and perhaps no link
    hub.fetched.clear()
    assert (find_model(NAME) / lost).is_file()
    assert hub.files_of(NAME) == [lost]


def test_of_a_model_that_was_only_planned_the_rest_is_downloaded(hub, complete):
    hub.push(NAME, complete)
    assert (find_config(NAME) / "config.json").is_file()
    assert hub.files_of(NAME) == ["config.json"]
    assert (find_model(NAME) / SHARDS[1]).is_file()
    assert sorted(hub.files_of(NAME)) == NEEDED


def test_a_tokenizer_alone_in_the_cache_is_no_model_to_plan_with(hub, complete):
    hub.push(NAME, complete)
    found = find_config(NAME)
    (found / "config.json").unlink()
    assert (find_config(NAME) / "config.json").is_file()


@pytest.mark.parametrize(
    "missing", ["generation_config.json", "tokenizer_config.json", "chat_template.jinja"]
)
def test_a_small_file_that_the_cache_lacks_is_not_done_without_unless_the_hub_is_away(
    hub, complete, monkeypatch, caplog, missing
):
    hub.push(NAME, complete)
    found = find_model(NAME)
    (found / missing).unlink()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert find_config(NAME) == find_model(NAME) == found
    assert "HF_HUB_OFFLINE is set" in caplog.text
    assert "lacks a file that the model has" in caplog.text
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    assert (find_model(NAME) / missing).is_file()


def test_a_single_file_is_downloaded_and_not_the_shards_of_a_stale_index(hub, model_dir, tmp_path):
    single = tiny_model.write(tmp_path / "single")
    shutil.copy(single / SINGLE_FILE, model_dir)
    (model_dir / SHARDS[0]).unlink()
    hub.push(NAME, model_dir)
    find_model(NAME)
    assert [name for name in hub.files_of(NAME) if name.endswith(".safetensors")] == [SINGLE_FILE]


def test_a_shard_that_a_repository_lacks_is_named_before_any_is_downloaded(hub, model_dir):
    (model_dir / SHARDS[1]).unlink()
    hub.push(NAME, model_dir)
    assert f"has no {SHARDS[1]}, which its {INDEX_FILE} names" in refusal()
    assert not set(SHARDS) & set(hub.files_of(NAME))


def test_weights_of_another_layout_are_refused_before_anything_is_downloaded(hub, model_dir):
    for name in (*SHARDS, INDEX_FILE):
        (model_dir / name).unlink()
    (model_dir / "pytorch_model.bin").write_text("weights")
    hub.push(NAME, model_dir)
    assert "It has pytorch_model.bin, and weights are read from safetensors files only: load" in refusal()
    assert hub.fetched == []


@pytest.mark.parametrize("find", [find_model, find_config])
def test_a_repository_without_a_configuration_is_refused_by_what_it_has(hub, tmp_path, find):
    (tmp_path / "repository").mkdir()
    (tmp_path / "repository" / "model-Q4_K_M.gguf").write_text("weights")
    hub.push(NAME, tmp_path / "repository")
    assert "owner/name has no config.json; " in refusal(find)
    assert "It has model-Q4_K_M.gguf" in refusal(find)


def test_a_revision_is_a_branch_a_tag_or_a_commit(hub, complete, model_dir):
    old = hub.push(NAME, model_dir, "v1", "old-branch")
    new = hub.push(NAME, complete)
    assert find_model(NAME).name == new
    for revision in ("v1", "old-branch", old):
        assert find_model(NAME, revision).name == old
        assert find_config(NAME, revision).name == old
    asked = hub.requests
    assert find_model(NAME, "v1").name == old
    assert hub.requests == asked


def test_main_stays_what_was_downloaded_when_it_goes_on(hub, complete, model_dir):
    old = hub.push(NAME, complete)
    find_model(NAME)
    new = hub.push(NAME, model_dir)
    assert find_model(NAME).name == old
    assert find_model(NAME, new).name == new
    assert find_model(NAME).name == old


@pytest.mark.parametrize("find", [find_model, find_config])
def test_what_the_hub_refuses_is_told_with_its_remedy(hub, complete, monkeypatch, find):
    assert "has no such repository, or it is private; check the name" in refusal(find)
    hub.push(NAME, complete)
    unknown = refusal(find, revision="no-such-tag")
    assert "at --revision no-such-tag" in unknown
    assert "it has no branch, tag or commit 'no-such-tag'; " in unknown
    hub.gated.add(NAME)
    assert f"{hub.url}/{NAME} is gated; accept its terms there, and give a token" in refusal(find)
    hub.token = "a token"
    assert "refuses the token; give one that is valid (HF_TOKEN" in refusal(find)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert "HF_HUB_OFFLINE is set, and" in refusal(find)
    assert "cannot be downloaded" in refusal(find, name="owner/a name")


def test_a_directory_has_no_revision(model_dir):
    for find in (find_model, find_config):
        assert "--revision is 'v1', but --base-model" in refusal(find, str(model_dir), "v1")
    assert "--revision is ' '; it must be a branch, a tag or a commit" in refusal(revision=" ")


COMPLETE = {"config.json", "tokenizer.json", SINGLE_FILE}


@pytest.mark.parametrize(
    "names, told",
    [
        (COMPLETE, None),
        (COMPLETE - {SINGLE_FILE} | {INDEX_FILE}, None),
        (COMPLETE - {"tokenizer.json"} | {"tekken.json"}, None),
        (COMPLETE - {"tokenizer.json"} | {"tiktoken.model"}, None),
        (COMPLETE - {"config.json"}, "has no config.json; a complete model"),
        (COMPLETE - {"tokenizer.json"}, "has no tokenizer.json; a complete model"),
        (COMPLETE - {"tokenizer.json"} | {"tokenizer.model"}, "of tokenizer.model none is made here; load"),
        (
            COMPLETE - {"tokenizer.json"} | {"vocab.json", "merges.txt"},
            "of vocab.json none is made here; load",
        ),
        (COMPLETE - {SINGLE_FILE}, "has no model.safetensors; the model's weights are missing"),
        (
            COMPLETE - {SINGLE_FILE} | {"pytorch_model-00001-of-00002.bin"},
            "It has pytorch_model-00001-of-00002.bin",
        ),
        ({"README.md", "model-Q4_K_M.gguf"}, "has no config.json; .* It has model-Q4_K_M.gguf"),
        (COMPLETE - {SINGLE_FILE} | {"training_args.bin"}, "missing or incomplete$"),
        (
            {"params.json", "tekken.json", "consolidated.safetensors"},
            "consolidated.safetensors, which is of another",
        ),
    ],
)
def test_what_a_model_lacks_is_named_with_what_helps(names, told):
    found = layout.problem(names)
    assert found is None if told is None else re.search(told, found)


def test_beside_the_weights_no_code_and_nothing_of_other_programs_is_downloaded():
    wanted = [
        "config.json",
        "additional_chat_templates/tool_use.jinja",
        "merges.txt",
        "tekken.json",
        INDEX_FILE,
    ]
    others = [
        *("original/params.json", "inference/configs/config.json", "assets/chat_format.jinja"),
        *("consolidated.safetensors.index.json", "pytorch_model.bin.index.json", "modeling_kimi.py"),
        *("README.md", "model.safetensors", "metal/model.bin", "onnx/vocab.txt"),
    ]
    assert layout.beside_weights([*others, *wanted]) == wanted
