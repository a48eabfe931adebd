import pytest

from spmd_tx.cli.other_names import translated
from spmd_tx.config import ServerConfig
from spmd_tx.errors import StartError


@pytest.mark.parametrize(
    "given, ours, about",
    [
        (
            "serve --base-model Qwen/Qwen3-4B --max-lora-adapters 3 --tensor-parallel-size 8 "
            "--train-micro-batch-size 1",
            "serve --base-model Qwen/Qwen3-4B --max-lora-adapters 3 --tensor-parallel-size 8",
            ["--train-tokens"],
        ),
        (
            "serve --base-model m --backend jax --no-enforce-eager --gradient-checkpointing --port 1",
            "serve --base-model m --port 1",
            ["one backend", "always compiled", "compute twice"],
        ),
        ("serve --session-timeout-sec -1", "serve --session-timeout 315360000", []),
        ("serve --use-ray --mhc-expansion-rate 1 --port 1", "serve --port 1", ["--num-processes"]),
        ("serve --session-timeout-sec=300 --port 1", "serve --session-timeout 300 --port 1", []),
        (
            "serve --limit stop_tokens=3 --batch-invariant",
            "serve --limit stop_tokens=3 --batch-invariant",
            [],
        ),
        ("plan --micro-batch-size 3", "plan --micro-batch-size 3", []),
        ("", "", []),
    ],
)
def test_options_are_taken_under_other_names(given, ours, about):
    arguments, notes = translated(given.split())
    assert arguments == ours.split()
    assert len(notes) == len(about)
    for part, note in zip(about, notes, strict=True):
        assert part in note


def test_the_configuration_of_a_backend_is_options():
    config = '{"max_lora_rank": 8, "enforce_eager": false, "sample_max_num_sequences": 64}'
    arguments, notes = translated(["serve", "--backend-config", config, "--port", "1"])
    assert arguments == ["serve", "--max-lora-rank", "8", "--port", "1"]
    assert [note.split()[0] for note in notes] == ["--no-enforce-eager", "--sample-max-num-sequences"]


# Of its server and of its JAX backend, as its release 0.3.0 has them.
THEIRS = (
    "base_model backend backend_config checkpoints_base database_url external_inference_url "
    "external_inference_api_key external_inference_lora_base forwarding_inference_max_connections "
    "session_cleanup_interval_sec session_timeout_sec max_lora_adapters max_lora_rank tensor_parallel_size "
    "expert_parallel_size fully_sharded_data_parallel_size train_micro_batch_size sample_max_num_sequences "
    "enforce_eager shard_attention_heads gradient_checkpointing mhc_expansion_rate loss_chunk_size "
    "coordinator_address num_processes use_ray ray_actor_options ray_pg_bundles host port"
)


@pytest.mark.parametrize("name", THEIRS.split())
def test_every_option_is_known(name):
    value = "{}" if name == "backend_config" else "1"
    arguments, notes = translated(["serve", f"--{name.replace('_', '-')}", value])
    taken = [argument[2:].replace("-", "_") for argument in arguments if argument.startswith("--")]
    assert set(taken) <= set(ServerConfig.__struct_fields__)
    assert taken or notes or name in ("backend_config", "mhc_expansion_rate")


def test_several_residual_streams_are_refused():
    with pytest.raises(StartError, match="mhc-expansion-rate is 4; models here have one residual stream"):
        translated(["serve", "--mhc-expansion-rate", "4"])


@pytest.mark.parametrize("text", ["{", "[]"])
def test_a_configuration_that_is_none_is_refused(text):
    with pytest.raises(StartError, match="JSON"):
        translated(["serve", "--backend-config", text])
