"""Takes options of ``spmd-tx serve`` under the names that SkyRL's Tinker server gives them."""

import json
from collections.abc import Iterator, Sequence
from typing import Any

from spmd_tx.errors import StartError

RENAMED = {"session-timeout-sec": "session-timeout"}
STARTED = "workers are started by the server, and on other hosts by spmd-tx worker: --num-processes"
SAMPLED_HERE = "the workers that train sample, too"
FOREVER = "315360000"  # seconds: ten years
MICRO_BATCH = "micro-batches are counted in tokens, and are as large as memory allows: --train-tokens"
# What decides here instead; the value has no effect.
DECIDED = {
    "train-micro-batch-size": MICRO_BATCH,
    "micro-batch-size": MICRO_BATCH,
    "sample-max-num-sequences": "as many sequences are sampled at once as memory allows: --decode-rows",
    "gradient-checkpointing": "workers compute twice what does not fit into memory, and nothing else",
    "enforce-eager": "steps are always compiled",
    "shard-attention-heads": "heads are split wherever --tensor-parallel-size divides them",
    "session-cleanup-interval-sec": "ended sessions are looked for every 30 seconds",
    "loss-chunk-size": "logits are computed in pieces that fit into memory",
    "coordinator-address": "workers find each other through the server: --worker-host and --jax-port",
    "use-ray": STARTED,
    "ray-actor-options": STARTED,
    "ray-pg-bundles": STARTED,
    "external-inference-url": SAMPLED_HERE,
    "external-inference-api-key": SAMPLED_HERE,
    "external-inference-lora-base": SAMPLED_HERE,
    "forwarding-inference-max-connections": SAMPLED_HERE,
    "backend": "there is one backend, in JAX",
}
FLAGS = ("gradient-checkpointing", "enforce-eager", "shard-attention-heads", "use-ray")  # without a value
CONFIG = "backend-config"  # a JSON object of further options


def translated(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the arguments of a command line under our names, and notes on those without effect.

    Raises StartError for a --backend-config that is no JSON object, and for several residual streams.
    """
    if not arguments or arguments[0] != "serve":
        return list(arguments), []
    renamed, notes = ["serve"], []
    for option, words in _options(arguments[1:]):
        name = option.removeprefix("no-") if option.removeprefix("no-") in FLAGS else option
        if name in DECIDED:
            notes.append(f"--{option} has no effect: {DECIDED[name]}")
        elif name == "mhc-expansion-rate":
            if words != ["1"]:
                raise StartError(f"--{name} is {' '.join(words)}; models here have one residual stream")
        elif name in RENAMED:
            renamed += [f"--{RENAMED[name]}", *(FOREVER if word == "-1" else word for word in words)]
        else:
            renamed += [f"--{option}", *words] if option else words
    return renamed, notes


def _options(arguments: Sequence[str]) -> Iterator[tuple[str, list[str]]]:
    """Yield each option without its dashes, with the words behind it; "" for words before all options."""
    name, words = "", list[str]()
    for argument in arguments:
        if not argument.startswith("--"):
            words.append(argument)
            continue
        yield from _option(name, words)
        name, equals, value = argument[2:].partition("=")
        words = [value] if equals else []
    yield from _option(name, words)


def _option(name: str, words: list[str]) -> Iterator[tuple[str, list[str]]]:
    if name == CONFIG:
        for key, value in _read(" ".join(words)).items():
            option = key.replace("_", "-")
            if option in FLAGS:
                yield (option if value else f"no-{option}"), []
            else:
                yield option, [str(value)]
    elif name or words:
        yield name, words


def _read(text: str) -> dict[str, Any]:
    try:
        config = json.loads(text)
    except ValueError as error:
        raise StartError(f"--{CONFIG} is {text!r}, which is not JSON: {error}") from None
    if not isinstance(config, dict):
        raise StartError(f"--{CONFIG} is {text!r}; it must be a JSON object of options")
    return config
