import json
import re
import shutil
import socket
from pathlib import Path

import pytest

from spmd_tx.config import ServerConfig
from spmd_tx.coordinator.server.preflight import check_keys, check_pages
from spmd_tx.coordinator.server.serve import serve
from spmd_tx.demo import tiny_model
from spmd_tx.errors import StartError

# 8 heads, 2 key-value heads, 64 dimensions, vocabulary of 512, 2048 positions; two weight files
SPEC = tiny_model.PRESETS["tiny-gqa"]


@pytest.fixture(scope="module")
def complete(tmp_path_factory):
    return tiny_model.write(tmp_path_factory.mktemp("complete"), SPEC)


@pytest.fixture
def model_dir(complete, tmp_path):
    """A copy that may be damaged."""
    return Path(shutil.copytree(complete, tmp_path / "model"))


async def refusal(model_dir, tmp_path, **options):
    """What the operator is told."""
    options = {"base_model": str(model_dir), "data_dir": tmp_path / "data", "port": 0} | options
    with pytest.raises(StartError) as refused:
        await serve(ServerConfig(**options))
    return str(refused.value)


@pytest.mark.parametrize(
    "options, message",
    [
        (
            {"tensor_parallel_size": 3},
            "--tensor-parallel-size is 3, but 8 attention heads cannot be split 3 ways",
        ),
        (
            {
                "fully_sharded_data_parallel_size": 1,
                "expert_parallel_size": 1,
                "tensor_parallel_size": 2,
                "num_processes": 3,
            },
            "--num-processes is 3, but the mesh of 2 devices .* cannot be split evenly",
        ),
        (
            {"max_context_length": 4096},
            "--max-context-length is 4096, but the model has positions for 2048 tokens only; set it",
        ),
        (
            {"kv_cache_tokens": 100},
            "--kv-cache-tokens is 100, less than one sequence of 2048 tokens; raise it, set it to 0",
        ),
        ({"host": "203.0.113.1"}, "cannot listen on 203.0.113.1, port 0: .* check --host and --port"),
        (
            {"local_processes": 2},
            "--local-processes is 2, but --num-processes is 1; lower the first or raise",
        ),
        (
            {"num_processes": 2, "tensor_parallel_size": 2, "local_processes": 1},
            "--local-processes is 1 of 2, so workers join from elsewhere, without a shared secret; "
            "give all of them the same --secret-file",
        ),
        (
            {"worker_host": "0.0.0.0"},
            "--worker-host 0.0.0.0 lets other hosts connect, without a shared secret; .*openssl rand -hex 32",
        ),
        ({"worker_host": "::"}, "--worker-host :: lets other hosts connect, without a shared secret"),
        ({"host": "a..b"}, "cannot listen on a..b, port 0: .*label empty or too long.*; check --host"),
        ({"num_processes": 200}, "200 worker processes are to start on this host, and 128 at most can"),
        ({"secret_file": Path("nowhere")}, "cannot read --secret-file nowhere: "),
        ({"base_model": "./nowhere"}, "--base-model ./nowhere is neither a directory nor a Hugging Face ID"),
        ({"base_model": ""}, "--base-model '' is neither a directory nor a Hugging Face ID"),
        ({"base_model": "a" * 300}, "--base-model a+ cannot be opened: File name too long; give a directory"),
        ({"base_model": "~nobody-here/x"}, "--base-model ~nobody-here/x cannot be opened"),
        (
            {"database_url": "postgresql://nobody@127.0.0.1:1/none"},
            "cannot open the database .* check --database-url",
        ),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)
async def test_options_that_cannot_work_are_named_with_the_remedy(complete, tmp_path, options, message):
    assert re.search(message, await refusal(complete, tmp_path, **options))


@pytest.mark.parametrize("host", ["0.0.0.0", "::"])
async def test_a_network_is_not_served_without_keys(complete, tmp_path, host):
    told = await refusal(complete, tmp_path, host=host)
    assert f"--host {host} lets others connect, and there are no API keys" in told
    assert "spmd-tx keys create" in told
    assert "--insecure-no-auth" in told


@pytest.mark.parametrize(
    "address, options, is_open, warning",
    [
        ("127.0.0.1", {}, True, "everyone on this machine has access"),
        ("::1", {}, True, "everyone on this machine has access"),
        ("0.0.0.0", {"host": "0.0.0.0", "insecure_no_auth": True}, True, "can reach 0.0.0.0 has access"),
        ("0.0.0.0", {"host": "0.0.0.0"}, False, None),
        ("127.0.0.1", {}, False, None),
    ],
)
def test_whom_a_server_lets_in_is_said(address, options, is_open, warning):
    said = check_keys(ServerConfig(base_model="m", **options), address, is_open)
    assert said is None if warning is None else warning in said


async def test_a_port_in_use_is_refused(complete, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        told = await refusal(complete, tmp_path, port=port)
    assert told == f"port {port} of 127.0.0.1 is in use; end that program, or set another --port"


async def test_a_data_directory_that_cannot_be_made_is_refused(complete, tmp_path):
    (tmp_path / "data").write_text("a file")
    assert "cannot create --data-dir" in await refusal(complete, tmp_path)


@pytest.mark.parametrize("missing", ["config.json", "tokenizer.json", "model-00002-of-00002.safetensors"])
async def test_an_incomplete_model_directory_is_refused(model_dir, tmp_path, missing):
    (model_dir / missing).unlink()
    assert f"{model_dir} has no {missing}" in await refusal(model_dir, tmp_path)


async def test_a_model_directory_without_weights_is_refused(model_dir, tmp_path):
    for file in model_dir.glob("*.safetensors*"):
        file.unlink()
    told = await refusal(model_dir, tmp_path)
    assert "has no model.safetensors; the model's weights are missing" in told


@pytest.mark.parametrize("damaged", ["config.json", "tokenizer.json", "model.safetensors.index.json"])
async def test_a_damaged_file_is_named(model_dir, tmp_path, damaged):
    (model_dir / damaged).write_text("{")
    assert f"{model_dir}/{damaged}" in await refusal(model_dir, tmp_path)


async def test_an_unsupported_architecture_is_refused(model_dir, tmp_path):
    config = json.loads((model_dir / "config.json").read_text())
    (model_dir / "config.json").write_text(json.dumps(config | {"architectures": ["OtherForCausalLM"]}))
    assert "holds a OtherForCausalLM; supported" in await refusal(model_dir, tmp_path)


def test_a_cache_that_holds_one_sequence_is_enough():
    check_pages(pages=5, page_size=16, max_context=64)
    with pytest.raises(StartError, match="room for 48 tokens"):
        check_pages(pages=4, page_size=16, max_context=64)
