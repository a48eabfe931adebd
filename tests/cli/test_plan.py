"""Tests ``spmd-tx plan`` as an operator runs it."""

import inspect
import json
import math
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from spmd_tx.cli import plan
from spmd_tx.cli.main import app
from spmd_tx.config import PARALLEL_SIZES, ServerConfig, options_of
from spmd_tx.demo import tiny_model
from spmd_tx.errors import StartError
from spmd_tx.worker.memory.accelerators import parse_devices
from tests.support.model_shapes import QWEN3_8B
from tests.support.tiny_setup import tiny_setup

COMMAND = Path(sys.executable).with_name("spmd-tx")
GIB = 2**30
QWEN3_4B = {
    "architectures": ["Qwen3ForCausalLM"],
    "head_dim": 128,
    "hidden_size": 2560,
    "intermediate_size": 9728,
    "max_position_embeddings": 40960,
    "num_attention_heads": 32,
    "num_hidden_layers": 36,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "tie_word_embeddings": True,
    "vocab_size": 151936,
}


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    """Make a model directory without weights and tokenizer."""
    directory = tmp_path_factory.mktemp("model")
    (directory / "config.json").write_text(json.dumps(QWEN3_4B))
    return directory


def told(model_dir, *arguments: str) -> str:
    """What the command says, in this process."""
    ended = CliRunner().invoke(app, ["plan", "--base-model", str(model_dir), *arguments])
    assert ended.exception is None, ended.exception
    return ended.stdout


def refusal(model_dir, *arguments: str) -> str:
    ended = CliRunner().invoke(app, ["plan", "--base-model", str(model_dir), *arguments])
    assert isinstance(ended.exception, StartError)
    return str(ended.exception)


def test_below_the_table_stand_speeds_the_price_of_the_context_and_the_command(model_dir):
    lines = told(model_dir, "--devices", "8xh100").splitlines()
    speeds = next(line for line in lines if line.startswith("at most, by arithmetic and memory alone"))
    most = 8 * 989e12 / (4 * 4_022_458_880)  # products with each weight, forward and back
    assert int(re.search(r"training ([\d,]+) tokens/s", speeds)[1].replace(",", "")) == pytest.approx(
        most, rel=0.01
    )
    (command,) = [line for line in lines if line.startswith("to serve it: ")]
    words = command.removeprefix("to serve it: spmd-tx ").split()
    assert words[:3] == ["serve", "--base-model", str(model_dir)]
    assert words[3:5] == ["--fully-sharded-data-parallel-size", "8"]

    scarce = told(model_dir, "--devices", "1xh100", "--memory-per-device", "52GiB").splitlines()
    (context,) = [line for line in scarce if line.startswith("a context of 40960 tokens takes")]
    assert "--max-context-length 20480" in context

    chosen = told(model_dir, "--devices", "8xh100", "--base-dtype", "int8", "--max-lora-rank", "16")
    (command,) = [line for line in chosen.splitlines() if line.startswith("to serve it: ")]
    assert "--base-dtype int8" in command
    assert "--max-lora-rank 16" in command

    unknown = told(
        model_dir, "--devices", "1", "--memory-per-device", "80GiB", "--max-context-length", "4096"
    )
    assert "at most, by" not in unknown
    assert "a context of" not in unknown
    assert "--max-context-length 4096" in unknown


def test_a_mesh_is_proposed_and_the_plan_adds_up(model_dir):
    command = [COMMAND, "plan", "--base-model", model_dir, "--devices"]
    ended = subprocess.run([*command, "8xh100", "--json"], capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stderr
    planned = json.loads(ended.stdout)
    sizes = [planned[f"{axis}_parallel_size"] for axis in ("fully_sharded_data", "expert", "tensor")]
    assert sizes == [8, 1, 1]
    assert planned["base_bytes"] == 2 * 4_022_468_096  # the parameters of Qwen3-4B
    uses = ("base_bytes", "adapter_bytes", "bank_bytes", "step_bytes", "cache_bytes", "compiling_bytes")
    assert sum(planned[use] for use in uses) == planned["device_bytes"] < 79.1 * GIB
    assert planned["train_tokens"] == 8192
    refused = subprocess.run([*command, "0xh100"], capture_output=True, text=True, timeout=120)
    assert (refused.returncode, refused.stdout) == (2, "")
    assert refused.stderr.startswith("spmd-tx: ")


def test_a_group_of_the_file_is_planned_by_its_own_options(model_dir, tmp_path):
    file = tmp_path / "server.toml"
    file.write_text(
        f"base_model = 'm'\ntensor_parallel_size = 4\n[[groups]]\nname = 'teacher'\n"
        f"base_model = '{model_dir}'\nrole = 'sample'\n"
    )

    of_group = "m", "--config", str(file), "--devices", "2xh100", "--json", "--group"
    planned = json.loads(told(*of_group, "teacher"))
    assert planned["fully_sharded_data_parallel_size"] * planned["tensor_parallel_size"] == 2
    assert planned["adapter_bytes"] == 0
    assert "the groups of the file of --config are teacher" in refusal(*of_group, "judge")


def test_several_groups_are_planned_each_for_its_devices(model_dir, tmp_path):
    file = tmp_path / "server.toml"
    file.write_text(
        f"base_model = '{model_dir}'\n[[groups]]\nname = 'teacher'\nbase_model = '{model_dir}'\n"
        "served_model_name = 'other'\nrole = 'sample'\nreplicas = 3\n"  # one of which is planned
    )

    def planned(*devices):
        arguments = ["plan", "--config", str(file), "--json"]
        ended = CliRunner().invoke(app, [*arguments, *(f"--devices={each}" for each in devices)])
        return json.loads(ended.output) if ended.exit_code == 0 else ended.exception

    both: Any = planned("main=4xh100", "teacher=2xh100")
    assert [*both] == ["main", "teacher"]
    meshes = [[each[size] for size in PARALLEL_SIZES] for each in both.values()]
    assert [math.prod(mesh) for mesh in meshes] == [4, 2]
    assert both["main"]["adapter_bytes"] > both["teacher"]["adapter_bytes"] == 0
    for devices in (("judge=2xh100",), ("main=2xh100", "2xh100"), ("main=2xh100", "main=2xh100")):
        assert "the groups are main, teacher" in str(planned(*devices))
    assert "group teacher: " in str(planned("teacher=v5e:1x1"))


def test_sizes_that_are_given_are_kept_and_the_others_are_chosen(model_dir):
    given = "--devices", "8xh100", "--tensor-parallel-size"
    planned = json.loads(told(model_dir, *given, "2", "--json"))
    assert [planned[size] for size in PARALLEL_SIZES] == [4, 1, 2]
    assert planned["why"] == "the only one for these devices"
    refused = refusal(model_dir, *given, "3")
    assert "a mesh with --tensor-parallel-size 3 cannot have 8 devices" in refused


def test_every_mesh_is_refused_with_its_own_reason_and_what_would_help(model_dir):
    config = ServerConfig(base_model=str(model_dir))
    with pytest.raises(StartError) as refused:
        plan.make(config, parse_devices("v5e:2x3", None))
    told = str(refused.value)
    assert told.startswith("no mesh (fsdp, ep, tp) of v5e:2x3 works. 6, 1, 1: a device has 15.1 GiB for it")
    for tp in (3, 6):
        assert f"{6 // tp}, 1, {tp}: --tensor-parallel-size is {tp}, but 32 attention heads cannot" in told
    assert "3, 1, 2 needs the least memory, but this does not fit" in told
    assert "--max-context-length 20480" in told
    assert told.count("would make it fit") == 1


@pytest.mark.parametrize(
    "sizes, words",
    [
        (
            {"expert_parallel_size": 3},
            "--expert-parallel-size 3 cannot have 8 devices, which 3 does not divide",
        ),
        (
            {"fully_sharded_data_parallel_size": 4, "tensor_parallel_size": 1},
            "only if --expert-parallel-size is 2, which is not chosen for a model with no experts",
        ),
        (dict.fromkeys(PARALLEL_SIZES, 8), "the mesh has 512 devices"),
    ],
)
def test_sizes_that_no_mesh_can_have_are_named(model_dir, sizes, words):
    with pytest.raises(StartError, match=words):
        plan.make(ServerConfig(base_model=str(model_dir), **sizes), parse_devices("8xh100", None))


@pytest.mark.parametrize("role", ["train", "sample"])
def test_a_mixture_of_which_all_weights_are_trained_is_refused_also_to_those_who_only_sample(tmp_path, role):
    tiny_model.write(tmp_path, replace(tiny_model.PRESETS["tiny"], family="qwen3_moe"))
    config = ServerConfig(base_model=str(tmp_path), full_parameters=True, role=role)
    with pytest.raises(StartError, match="has experts, and --full-parameters trains dense models"):
        plan.make(config, parse_devices("8xh100", None))


@pytest.mark.parametrize("option", ["--only", "--hlo"])
def test_options_of_compile_are_refused_without_it(model_dir, option):
    refused = refusal(model_dir, "--devices", "h100", option, "x")
    assert f"{option} is 'x', which has no effect without --compile" in refused


def test_a_server_that_asks_for_a_mesh_gives_all_options_on_which_it_depends():
    of_plan = {
        "config",
        "devices",
        "memory_per_device",
        "as_json",
        "compiles",
        "only",
        "hlo",
        "minutes",
        "group",
        "context",
    }
    assert {*inspect.signature(plan.plan).parameters} == of_plan | {*options_of("plan")}
    assert {"base_model", *PARALLEL_SIZES} <= {*options_of("plan")}


def test_the_table_names_what_a_device_holds(model_dir):
    table = told(model_dir, "--devices", "h200", "--max-context-length", "8192")
    for words in ("base weights", "7.5 GiB", "training slots", "keys and values", "--tensor-parallel-size 1"):
        assert words in table


def test_where_training_slots_are_left_open_there_are_as_many_as_fit(model_dir):
    device = "--devices", "1", "--memory-per-device", "40GiB"
    planned = json.loads(told(model_dir, *device, "--json"))
    assert planned["adapter_slots"] < 8
    refused = refusal(model_dir, *device, "--max-lora-adapters", "8")
    assert f"--max-lora-adapters {planned['adapter_slots']}" in refused


def test_what_does_not_fit_is_refused_with_what_would_help(model_dir):
    refused = refusal(model_dir, "--devices", "1", "--memory-per-device", "32GiB")
    assert "7.5 GiB for base weights" in refused
    assert "--max-context-length" in refused


@pytest.mark.parametrize(
    "text, memory, expected",
    [
        ("v5p:2x2x2", None, (8, "v5p")),
        ("V6E:2x4", "31GiB", (8, "v6e")),
        ("8xh100", None, (8, "h100")),
        ("h200", None, (1, "h200")),
        ("2 x RTX 4090", None, (2, "rtx4090")),
        ("4xcpu", None, (4, "cpu")),
        ("3", "10GiB", (3, "")),
    ],
)
def test_devices_are_a_number_and_a_name(text, memory, expected):
    devices = parse_devices(text, memory)
    assert (devices.count, devices.kind) == expected


@pytest.mark.parametrize(
    "text, memory, words",
    [
        ("8xabacus", None, "abacus.*--memory-per-device"),
        ("h100:2x4", None, "only TPUs have a topology.*8xh100"),
        ("v5e:0x4", None, "v5e:2x4"),
        ("8", None, "--memory-per-device"),
        ("0xh100", None, "8xh100"),
        ("9" * 30 + "xh100", None, "at most 65536"),
        ("v5e:1000x1000", None, "at most 65536"),
        ("v5e:2x2x2", None, "slices of v5e have 2 sizes, as in v5e:2x4"),
        ("v5p:8", None, "slices of v5p have 3 sizes, as in v5p:2x2x2"),
        ("8xh100", "0", "--memory-per-device is '0'"),
        ("8xh100", "5%", "--memory-per-device is '5%'"),
        ("", None, "8xh100"),
        ("8", "much", "500MB"),
    ],
)
def test_other_devices_are_refused(text, memory, words):
    with pytest.raises(StartError, match=words):
        parse_devices(text, memory)


@pytest.mark.parametrize(
    "devices, attention, gib",
    [
        ("8xh100", "triton", 0.92 * 0.96 * 79.1),
        ("8xa100", "triton", 0.92 * 0.96 * 79.1),
        ("v5e:2x4", "mosaic", 0.96 * 15.75),  # TPUs give JAX all their memory
        ("8xcpu", "reference", None),
    ],
)
def test_devices_have_the_attention_and_the_memory_that_workers_find(devices, attention, gib):
    from spmd_tx.worker.memory.offline import usable_memory, with_kernels

    parsed = parse_devices(devices, None)
    assert with_kernels(tiny_setup(), QWEN3_8B, parsed).kernels.rows == attention
    if gib is not None:
        assert usable_memory(parsed).bytes == pytest.approx(gib * GIB)


def test_a_slice_of_tpus_is_planned(model_dir):
    table = told(model_dir, "--devices", "v5e:2x4", "--max-context-length", "2048")
    assert "v5e:2x4, 15.8 GiB each" in " ".join(table.split())  # lines are broken behind long paths


def test_compiling_for_unknown_devices_is_refused_with_those_that_are_known(model_dir):
    assert "does not know l4; it knows a100" in refusal(model_dir, "--devices", "8xl4", "--compile")
