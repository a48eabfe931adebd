"""The options of servers that are fuzzed: each option is in a set, or there is a reason why not."""

from dataclasses import dataclass, replace
from pathlib import Path

from spmd_tx.coordinator.text.chat_template import TEMPLATE
from spmd_tx.demo import tiny_model
from tests.fuzz.alice import TOLERANCE
from tests.support.chat_templates import QWEN3
from tests.support.mtp_models import make_drafts_right

PROSE = r"# Tools\n\nSignatures of functions are within <tools></tools> XML tags:\n"  # of 60 tokens
TINY = tiny_model.PRESETS["tiny"]


@dataclass(frozen=True)
class OptionSet:
    """Options beside those that all servers of the fuzzer have."""

    options: dict[str, object]
    family: str = "qwen3"
    tolerance: float = TOLERANCE  # of the bystander's sampled log-probabilities, in nats; 0: bit for bit
    rank: int = 4  # of the bystander's model; 0: all weights

    def write_model(self, folder: Path) -> Path:
        write_model(folder, self.family)
        if self.options.get("speculation") == "mtp":
            make_drafts_right(folder, self.family, TINY)
        return folder


def write_model(folder: Path, family: str = "qwen3") -> Path:
    """With a template that shows tools and reasoning: without it all turns of agents would be refused."""
    tiny_model.write(folder, replace(TINY, family=family))
    (folder / TEMPLATE).write_text(QWEN3.replace(PROSE, ""))
    return folder


OPTION_SETS = {
    "batch-invariant": OptionSet(
        {"batch_invariant": True, "dtype": "bfloat16", "speculation": "auto"}, tolerance=0.0
    ),
    "batch-invariant, two data shards": OptionSet(
        {"batch_invariant": True, "fully_sharded_data_parallel_size": 2, "shard_base_weights": "yes"},
        tolerance=0.0,
    ),
    "two processes, split matrices": OptionSet({"num_processes": 2, "tensor_parallel_size": 2}),
    "split experts": OptionSet({"expert_parallel_size": 2, "expert_lora": "per-expert"}, "qwen3_moe"),
    "rounded base": OptionSet({"base_dtype": "int8", "speculation": "auto"}),
    "states, and few of them": OptionSet({"state_cache": "4MiB", "speculation": "auto"}, "qwen3_5"),
    "batch-invariant states": OptionSet(
        {"batch_invariant": True, "speculation": "auto"}, "qwen3_5", tolerance=0.0
    ),
    "batch-invariant, drafts of the model itself": OptionSet(
        {"batch_invariant": True, "speculation": "mtp"}, "glm4_moe", tolerance=0.0
    ),
    "all weights": OptionSet({"full_parameters": True}, rank=0),
    "little room": OptionSet(
        {
            "max_context_length": 64,
            "page_size": 4,
            "kv_cache_tokens": 96,
            "decode_rows": 3,
            "decode_steps": 2,
            "sampler_slots": 2,
            "train_tokens": 64,
            "max_lora_adapters": 1,
            "max_lora_rank": 8,
        }
    ),
    "a model that sees": OptionSet({"image_tokens": 512}, "qwen3_vl"),
    "programs ahead of need": OptionSet({"warm_up": "background"}),
}

# Options of every server of the fuzzer
EVERYWHERE = (
    *("base_model", "served_model_name", "data_dir", "port", "database_url"),
    *("max_context_length", "snapshot_seconds"),
)

_CONNECTIONS = "changes who may connect, and nothing that a request meets"
_KEPT = "deletes what is old; a run is over long before"
NOT_FUZZED = {
    "expert_weights": "says how devices hold experts of checkpoints that the fuzzer's small models are not",
    "role": "refuses what the stories train; tests/sdk/test_role.py has a server that only samples",
    "revision": "names a state of a hub's repository; the fuzzer's models are directories",
    "host": _CONNECTIONS,
    "trusted_proxies": _CONNECTIONS,
    "tls_cert": _CONNECTIONS,
    "tls_key": _CONNECTIONS,
    "insecure_no_auth": _CONNECTIONS,
    "worker_host": _CONNECTIONS,
    "worker_port": _CONNECTIONS,
    "jax_port": _CONNECTIONS,
    "secret_file": _CONNECTIONS,
    "worker_devices": "says which devices of a host are whose; tests of the mesh choice do",
    "local_processes": "says on which hosts workers start; tests/hosts does",
    "log_format": "changes how lines of the log look",
    "checkpoints_base": "remote stores have stories of their own: tests/coordinator/checkpoints and make s3",
    "session_timeout": "ends sessions that no client keeps; the stories' clients do not",
    "drain_seconds": "is for a server that ends by a signal; this one is killed",
    "command_timeout": "is for workers that hang; tests/chaos has them",
    "min_free_disk": "refuses new work; tests/chaos fills disks",
    "keep_results_hours": _KEPT,
    "keep_versions_hours": _KEPT,
    "keep_audit_days": _KEPT,
    "keep_metrics_days": _KEPT,
    "max_compilation_cache": _KEPT,
    "max_checkpoint_cache": _KEPT,
    "group": "names the group whose options they are",
    "groups": "have stories of their own: tests/sdk/test_three_groups.py",
    "processes_beside": "counts the workers of those groups",
    "bounds": "are numbers that requests are compared with; tests/test_bounds.py has each",
}
