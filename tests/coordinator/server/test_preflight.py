import socket
from contextlib import nullcontext
from pathlib import Path

import msgspec
import pytest

from spmd_tx.config import ServerConfig
from spmd_tx.coordinator.server.preflight import check_folders, check_hosts, check_mesh, check_sight, listen
from spmd_tx.demo import tiny_model
from spmd_tx.demo.tiny_model import Spec, model_config
from spmd_tx.errors import StartError
from spmd_tx.models.config import read_model_config
from spmd_tx.models.families.registry import declare
from spmd_tx.options import AUTO
from tests.support import encoded_models


@pytest.fixture(scope="module")
def mixture(tmp_path_factory):
    return read_model_config(
        tiny_model.write(tmp_path_factory.mktemp("mixture"), tiny_model.PRESETS["tiny-moe"])
    )


@pytest.mark.parametrize(
    "options",
    [
        {"expert_parallel_size": 8},
        {"expert_parallel_size": 4, "tensor_parallel_size": 2},
        {"fully_sharded_data_parallel_size": 3},
        {"fully_sharded_data_parallel_size": 4, "shard_base_weights": "yes"},
    ],
)
def test_a_mesh_over_which_the_experts_split_is_taken(mixture, options):
    check_mesh(ServerConfig(base_model="tiny-moe", **options), mixture)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"expert_parallel_size": 3}, "--expert-parallel-size is 3, but 8 experts cannot be split 3 ways"),
        (
            {"fully_sharded_data_parallel_size": 3, "shard_base_weights": "yes"},
            "--shard-base-weights is yes .* width 64 cannot be split 3 ways",
        ),
        (
            {"fully_sharded_data_parallel_size": 3, "full_parameters": True},
            "--full-parameters is set .* width 64 cannot be split 3 ways",
        ),
        (
            {
                "fully_sharded_data_parallel_size": 2,
                "expert_parallel_size": 1,
                "tensor_parallel_size": 1,
                "worker_devices": 4,
            },
            "--worker-devices is 4, but the mesh of 2 devices",
        ),
    ],
)
def test_one_over_which_they_do_not_is_refused(mixture, options, message):
    with pytest.raises(StartError, match=message):
        check_mesh(ServerConfig(base_model="tiny-moe", **options), mixture)


def test_ranks_of_latent_attention_must_split_over_fsdp(tmp_path):
    path = tiny_model.write(tmp_path, tiny_model.Spec(family="deepseek_v3", d_model=96))
    config = ServerConfig(
        base_model="tiny",
        fully_sharded_data_parallel_size=3,
        shard_base_weights="yes",
        tensor_parallel_size=2,
    )
    with pytest.raises(StartError, match="has matrices whose width 32 cannot be split 3 ways"):
        check_mesh(config, read_model_config(path))


def test_images_are_asked_only_of_models_that_can_take_them():
    model, sees = (declare(model_config(Spec(family=each), {})) for each in ("qwen3", "qwen3_vl"))
    asked = ServerConfig(base_model="tiny", image_tokens=4096)
    for full in (False, True):
        check_sight(msgspec.structs.replace(asked, full_parameters=full), sees)
    for tokens in (0, AUTO):
        check_sight(ServerConfig(base_model="tiny", image_tokens=tokens), model)
    message = "--image-tokens is 4096, but tiny has no vision tower; leave the option out"
    with pytest.raises(StartError, match=message):
        check_sight(asked, model)


def test_heads_of_keys_in_linear_attention_must_split(tmp_path):
    model = read_model_config(tiny_model.write(tmp_path, tiny_model.Spec(family="qwen3_5")))
    check_mesh(ServerConfig(base_model="tiny", tensor_parallel_size=2), model)
    with pytest.raises(StartError, match="but 2 heads of keys of linear attention cannot be split 4 ways"):
        check_mesh(ServerConfig(base_model="tiny", tensor_parallel_size=4), model)


@pytest.fixture(scope="module")
def packed(tmp_path_factory):
    """Each expert's down has two groups of inputs, and so have gate and up."""
    path = encoded_models.write(tmp_path_factory.mktemp("packed"), "mxfp4")
    return read_model_config(path, expert_weights="packed")


@pytest.mark.parametrize(
    "options, message",
    [
        ({"tensor_parallel_size": 2}, None),
        ({"fully_sharded_data_parallel_size": 2, "shard_base_weights": "yes"}, None),
        ({"tensor_parallel_size": 4}, "packed experts have 2 groups .* cannot be split 4 ways"),
        (
            {"fully_sharded_data_parallel_size": 4, "shard_base_weights": "yes"},
            "--fully-sharded-data-parallel-size is 4, but packed experts have 2 groups",
        ),
    ],
)
def test_groups_with_a_scale_are_not_cut(packed, options, message):
    refused = nullcontext() if message is None else pytest.raises(StartError, match=message)
    with refused:
        check_mesh(ServerConfig(base_model="packed", expert_weights="packed", **options), packed)


@pytest.mark.parametrize(
    "options, refused",
    [
        ({"data_dir": Path("/runs [1]/data")}, "--data-dir is '/runs .1./data'"),
        ({"data_dir": Path("/runs/**/data")}, "--data-dir is "),
        ({"data_dir": Path("s3://bucket/runs").absolute()}, "it must be a directory that all hosts see"),
        ({"data_dir": Path("/runs"), "checkpoints_base": "/shared/[a-c]"}, "--checkpoints-base is "),
        ({"data_dir": Path("/runs #1 %20 ?{a}/[data"), "checkpoints_base": "s3://bucket/[1]"}, None),
    ],
)
def test_folders_that_are_urls_or_taken_for_patterns_are_refused(options, refused):
    expected = nullcontext() if refused is None else pytest.raises(StartError, match=refused)
    with expected:
        check_folders(ServerConfig(base_model="m", **options))


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.2", "localhost", "::1"])
def test_workers_at_loopback_need_no_shared_secret(host):
    check_hosts(ServerConfig(base_model="m", worker_host=host), secret=None)


def test_a_name_is_listened_on_at_its_first_address_that_is_of_this_machine(monkeypatch):
    real = socket.getaddrinfo

    def getaddrinfo(host, port, **options):
        hosts = ["203.0.113.1", "127.0.0.2"] if host == "head" else [host]
        return [found for each in hosts for found in real(each, port, **options)]

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    with listen("head", 0, 100) as listening:
        assert listening.getsockname()[0] == "127.0.0.2"
        with pytest.raises(StartError, match=r"port \d+ of head is in use"):
            listen("head", listening.getsockname()[1], 100)
