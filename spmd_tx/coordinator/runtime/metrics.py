"""The coordinator's Prometheus metrics. Whichever module knows a number sets it here."""

from collections.abc import Callable, Iterable
from functools import partial

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from spmd_tx.coordinator.runtime import log_groups
from spmd_tx.group_names import MAIN
from spmd_tx.protocol.memory_plan import MemoryPlan

CONTENT_TYPE = CONTENT_TYPE_LATEST
REGISTRY = CollectorRegistry()
gauge, counter = partial(Gauge, registry=REGISTRY), partial(Counter, registry=REGISTRY)
histogram = partial(Histogram, registry=REGISTRY)

DISK_BYTES = gauge("spmd_tx_disk_bytes", "Bytes on disk in the data directory, by kind.", ["kind"])
DISK_FREE_BYTES = gauge("spmd_tx_disk_free_bytes", "Bytes that are free where the data directory is.")
RECLAIMED_BYTES = counter(
    "spmd_tx_reclaimed_bytes", "Bytes that housekeeping has deleted, by kind.", ["kind"]
)
STORAGE_IS_PAUSED = gauge("spmd_tx_storage_paused", "1 while no new work is taken for want of storage.")
CLOCK_IN_DOUBT = gauge(
    "spmd_tx_clock_in_doubt", "1 while the machine's clock has jumped, and nothing is deleted for its age."
)
KEYS_MISSING_SECONDS = counter(
    "spmd_tx_keys_missing_seconds",
    "Seconds in which nobody was let in, because all API keys were gone from the database.",
)
UNFINISHED_REQUESTS = gauge(
    "spmd_tx_unfinished_requests", "Requests that were accepted and have no result yet."
)

REQUESTS = counter(
    "spmd_tx_requests",
    "Requests that have got an outcome, by kind; error is user or server, or empty.",
    ["kind", "error"],
)
REQUEST_SECONDS = histogram(
    "spmd_tx_request_seconds",
    "Seconds from the acceptance of a request until its outcome is durable, by kind.",
    ["kind"],
    buckets=(0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 60, 180, 600),
)
TOKENS = counter(
    "spmd_tx_tokens",
    "Tokens of requests with results: trained, forwarded, prompt, cached (of these prompts) or sampled.",
    ["use"],
)

INTERNAL_ERRORS = counter(
    "spmd_tx_internal_errors",
    "Errors of the server itself that failed a request, or a round of its own work; the log has each.",
)

LOOP_STALLS = counter(
    "spmd_tx_event_loop_stalls", "Times that the event loop stood for more than a second; the log says where."
)
LOOP_STALL_SECONDS = counter("spmd_tx_event_loop_stall_seconds", "Seconds that it stood in those times.")
LONGEST_LOOP_STALL = gauge("spmd_tx_event_loop_longest_stall_seconds", "The longest of them since the start.")

GENERATION = gauge("spmd_tx_generation", "Number of the present generation of workers.", ["group"])
GENERATIONS = counter(
    "spmd_tx_generations", "Generations of workers that this server has started.", ["group"]
)
UNANNOUNCED_LOSSES = counter(
    "spmd_tx_unannounced_losses",
    "Generations of workers that ended, unless a worker of them left after SIGTERM.",
    ["group"],
)
REPLAYED_REQUESTS = counter(
    "spmd_tx_replayed_requests", "Requests that were run again to restore a model.", ["group"]
)
REPLAY_DIGEST_MISMATCHES = counter(
    "spmd_tx_replay_digest_mismatches",
    "Requests that were run again and gave another result than the stored one.",
    ["group"],
)
SNAPSHOT_SECONDS = histogram(
    "spmd_tx_snapshot_seconds",
    "Seconds from a snapshot's command until it is complete on disk.",
    ["group"],
    buckets=(0.1, 0.5, 1, 2, 5, 10, 30, 60, 120, 300),
)

DEVICE_SECONDS = counter(
    "spmd_tx_device_seconds",
    "Seconds in which devices worked on commands, by what for: training or sampling.",
    ["use", "group"],
)

SWAP_SECONDS = histogram(
    "spmd_tx_swap_seconds",
    "Seconds in which workers moved an adapter off the device (out) or back to it (in), from host or disk.",
    ["direction", "tier", "group"],
    buckets=(0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5),
)
IDLE_ADAPTER_BYTES = gauge(
    "spmd_tx_idle_adapter_bytes",
    "Bytes that process 0 keeps of adapters that are not on the device, in host memory and on disk.",
    ["tier", "group"],
)

MICRO_BATCHES = counter(
    "spmd_tx_micro_batches",
    "Micro-batches of training sent to workers, by whether several models share them.",
    ["shared", "group"],
)
TRAINING_ROWS = counter(
    "spmd_tx_training_rows",
    "Rows of these micro-batches: used, or free because a block has a fixed number of rows.",
    ["kind", "group"],
)
TRAINING_TOKENS = counter(
    "spmd_tx_training_tokens",
    "Tokens of these micro-batches: used by datums, or padding of rows and free rows.",
    ["kind", "group"],
)

IMAGES = counter("spmd_tx_images", "Images that accepted requests refer to, each once for a request.")
DECODED_IMAGES = counter("spmd_tx_images_decoded", "Images that were decoded in child processes.")
CHANGED_IMAGES = counter("spmd_tx_images_changed", "Images that were decoded to other patches than before.")
ENCODED_IMAGES = counter("spmd_tx_images_encoded", "Images that devices made into tokens.", ["group"])
PROMPT_TOKENS = counter("spmd_tx_prompt_tokens", "Tokens of the prompts that were sampled from.", ["group"])
CACHED_PROMPT_TOKENS = counter(
    "spmd_tx_prompt_tokens_cached",
    "Tokens of these prompts whose keys and values were found in the prefix cache.",
    ["group"],
)
PROMPT_TOKENS_BESIDE = counter(
    "spmd_tx_prompt_tokens_beside_decodes",
    "Tokens of these prompts that decodes read beside their rows.",
    ["group"],
)

DRAFTED_TOKENS = counter(
    "spmd_tx_drafted_tokens", "Tokens that were read ahead by speculation, whether right or not.", ["group"]
)
ACCEPTED_TOKENS = counter(
    "spmd_tx_accepted_tokens", "Of the drafted tokens, those that samples drew, too.", ["group"]
)

# Source "cache" is the compilation cache on disk; program "other" holds programs that belong to no step.
COMPILES = counter(
    "spmd_tx_compiles",
    "Programs that worker 0 has compiled, or loaded from the compilation cache.",
    ["program", "source", "group"],
)
COMPILE_SECONDS = counter(
    "spmd_tx_compile_seconds", "Seconds that this took, tracing aside.", ["program", "source", "group"]
)
UNFORESEEN_COMPILES = counter(
    "spmd_tx_unforeseen_compiles",
    "Programs that a command of worker 0 had to wait for, since they were not ordered before it: a mistake.",
    ["group"],
)
PROGRAMS_PLANNED = gauge(
    "spmd_tx_programs_planned", "Programs that workers compile ahead of need.", ["group"]
)
PROGRAMS_READY = gauge("spmd_tx_programs_ready", "Those of them that are ready.", ["group"])
GROUP_READY = gauge("spmd_tx_group_ready", "1 while the workers of a group run commands.", ["group"])
GROUP_WAITING_TOKENS = gauge(
    "spmd_tx_group_waiting_tokens",
    "Tokens of unfinished samples of a group, at most; to read a prompt counts as many as take as long.",
    ["group"],
)
MOVED_SAMPLES = counter(
    "spmd_tx_moved_samples",
    "Samples that went on with another group of their base model, by why: their group was lost, or is "
    "leaving, another one joined or had none left (idle), or theirs did not come back (abandoned).",
    ["why"],
)
ROUTED_SAMPLES = counter(
    "spmd_tx_routed_samples",
    "Samples that were bound to a group on arrival, by why: it was the only one that was ready, it had the "
    "least waiting, its prefix cache had more of the prompt (cached), or others that begin alike were there.",
    ["group", "why"],
)
PUBLISH_SECONDS = histogram(
    "spmd_tx_publish_seconds",
    "Seconds from the command that saves weights until other groups can load them.",
    ["group"],
    buckets=(0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60),
)
GROUP_STATE = gauge(
    "spmd_tx_group_state", "1 for the state in which a group is, as in /healthz.", ["group", "state"]
)

PLANNED_BYTES = gauge(
    "spmd_tx_planned_bytes", "Bytes of a device that the memory plan has, by use.", ["use", "group"]
)
PLANNED_TOKENS = gauge(
    "spmd_tx_planned_tokens",
    "Tokens of one data shard that a training micro-batch (train) or the cache (cache) has room for.",
    ["use", "group"],
)


def group() -> str:
    """Return the label of the group for which code runs."""
    return log_groups.current() or MAIN


def show_group(name: str) -> None:
    """Publish the counters of a group before it counts anything, so that their first step is seen, too."""
    for family in (
        *(GENERATIONS, REPLAYED_REQUESTS, REPLAY_DIGEST_MISMATCHES, SNAPSHOT_SECONDS),
        *(PROMPT_TOKENS, CACHED_PROMPT_TOKENS, UNFORESEEN_COMPILES, UNANNOUNCED_LOSSES),
        *(DRAFTED_TOKENS, ACCEPTED_TOKENS, ENCODED_IMAGES, PROMPT_TOKENS_BESIDE),
    ):
        family.labels(name)
    GROUP_READY.labels(name).set(0)


def follow_state(name: str, states: Iterable[str], state: Callable[[], str]) -> None:
    """Publish which of some states a group is in, from now on."""
    for each in states:
        GROUP_STATE.labels(name, each).set_function(lambda each=each: state() == each)


def show_plan(plan: MemoryPlan) -> None:
    """Publish the memory plan of the present generation of workers."""
    uses = {
        "base": plan.base_bytes,
        "adapters": plan.adapter_bytes,
        "bank": plan.bank_bytes,
        "steps": plan.step_bytes,
        "compiling": plan.compiling_bytes,
        "cache": plan.cache_bytes,
        **({"images": plan.tower_bytes + plan.image_bytes} if plan.image_tokens else {}),
    }
    for use, size in uses.items():
        PLANNED_BYTES.labels(use, group()).set(size)
    PLANNED_TOKENS.labels("train", group()).set(plan.train_tokens)
    PLANNED_TOKENS.labels("cache", group()).set(plan.cache_tokens)


def exposition() -> bytes:
    """All metrics in the text format of Prometheus."""
    return generate_latest(REGISTRY)
