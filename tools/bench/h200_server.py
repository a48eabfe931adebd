"""Starts the real server on this machine's GPUs, and trains and samples with the real SDK.

    python -m tools.bench.h200_server                           Qwen3-4B's shape, with random weights
    python -m tools.bench.h200_server --shape tiny              the same in a minute, on any machine

Prints how long the server takes until it is ready, tokens per second of training, sampling and iterations of
reinforcement learning, and how far the log-probabilities of samples are from those of the trainer.
"""

import argparse
import json
import os
import re
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

from tinker import types

from spmd_tx.demo import tiny_model
from spmd_tx.demo.tiny_model import Spec
from tools.bench.client import tensor
from tools.bench.sections import Limits, Load, Sections
from tools.bench.servers import Launch, Server

QWEN3_4B = Spec(
    n_layers=36,
    d_model=2560,
    n_heads=32,
    n_kv_heads=8,
    head_dim=128,
    d_ff=9728,
    vocab_size=151936,
    max_positions=40960,
    dtype="bfloat16",
    n_shards=4,
    std=0.02,
)
SHAPES = {
    "tiny": Spec(vocab_size=512),
    "gpu-small": replace(
        QWEN3_4B,
        n_layers=2,
        d_model=512,
        n_heads=8,
        n_kv_heads=2,
        d_ff=1024,
        vocab_size=2048,
        max_positions=4096,
    ),
    "4b": QWEN3_4B,
    "1.7b": replace(QWEN3_4B, n_layers=28, d_model=2048, n_heads=16, d_ff=6144),
}
LOADS = {
    "tiny": Load(512, 4, 64, 64, 2, 2, 16, 2),
    "gpu-small": Load(2048, 8, 256, 512, 4, 4, 64, 4),
}
USUAL_LOAD = Load(151936, 32, 1024, 2048, 16, 16, 256, 8)
SECTIONS = (
    "train_uniform",
    "sample_uniform",
    "rl_iteration",
    "sample_single",
    "train_ragged",
    "sample_ragged",
)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", default="4b", choices=list(SHAPES))
    parser.add_argument("--model", type=Path, help="where its weights are, or will be written")
    parser.add_argument("--data-dir", type=Path, help="the server's; default: one that is removed at the end")
    parser.add_argument("--sections", default=",".join(SECTIONS), help="some of " + ",".join(SECTIONS))
    parser.add_argument("--seconds", type=float, default=300.0, help="for all of it")
    parser.add_argument("--out", type=Path, default=Path("build/h200_server.json"))
    parser.add_argument("--only-model", action="store_true", help="write the weights and end")
    parser.add_argument("options", nargs="*", help="further options of `spmd-tx serve`, behind --")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = options.model or Path(folder) / "model"
        if not (model / "config.json").exists():
            began = time.monotonic()
            tiny_model.write(model, SHAPES[options.shape])
            print(f"weights written in {time.monotonic() - began:.0f} s", flush=True)
        if not options.only_model:
            measure(options, model, options.data_dir or Path(folder) / "data")
    return 0


def measure(options: argparse.Namespace, model: Path, data_dir: Path) -> None:
    """Start a server, run the sections in turn while time is left, and tell and keep what they say."""
    deadline = time.monotonic() + options.seconds
    options.out.parent.mkdir(parents=True, exist_ok=True)
    found: dict[str, Any] = {}

    def tell(name: str, figures: Any) -> None:
        found[name] = figures
        options.out.write_text(json.dumps(found, indent=1))
        print(f"{name}: {json.dumps(figures)}", flush=True)

    server = Server(launch(model, data_dir, options.options), options.out.with_suffix(".log"))
    try:
        tell("answers after seconds", round(server.wait_until_healthy(options.seconds), 1))
        load = LOADS.get(options.shape, USUAL_LOAD)
        limits = replace(Limits(), repeats=3, seconds=15.0)
        sections = Sections(server.url, str(model), load, limits, server.cpu_seconds)
        tell("first answer after seconds", timed(sections.client.trainers, 1, since=server.started))
        tell("log-probabilities", agreement(sections))
        for name in options.sections.split(","):
            if time.monotonic() > deadline:
                tell(name, "no time left")
                continue
            tell(name, shown(getattr(sections, name)()))
        tell("programs", programs(server.url))
    finally:
        server.close()


def launch(model: Path, data_dir: Path, options: list[str]) -> Callable[[int], Launch]:
    """Describe our server on all devices of this machine."""
    data_dir.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "spmd_tx.cli", "serve", "--base-model", str(model)]
    command += ["--data-dir", str(data_dir), *options]
    return lambda port: Launch([*command, "--port", str(port)], dict(os.environ), Path.cwd())


def timed(call: Callable[..., Any], *args: Any, since: float) -> float:
    call(*args)
    return round(time.monotonic() - since, 1)


def agreement(sections: Sections) -> dict[str, float]:
    """Return how far samples' log-probabilities are from the trainer's for the same tokens, in nats."""
    client, load = sections.client, sections.load
    prompts = [client.text(32) for _ in range(load.prompts)]
    groups = client.sample(client.sampler_of(client.trainer), prompts, [load.answer] * len(prompts), 1)
    data = [datum([*prompt, *group[0].tokens]) for prompt, group in zip(prompts, groups, strict=True)]
    outputs = client.done(client.trainer.forward(data, "cross_entropy")).loss_fn_outputs
    differences: list[float] = []
    for prompt, group, output in zip(prompts, groups, outputs, strict=True):
        values = list(output["logprobs"].data)[len(prompt) - 1 :]
        differences += [abs(a - b) for a, b in zip(values, group[0].logprobs or [], strict=True)]
    return {
        "tokens": len(differences),
        "mean nats": sum(differences) / len(differences),
        "worst nats": max(differences),
    }


def datum(tokens: list[int]) -> types.Datum:
    inputs = {
        "target_tokens": tensor(tokens[1:], "int64"),
        "weights": tensor([1.0] * (len(tokens) - 1), "float32"),
    }
    return types.Datum(model_input=types.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=inputs)


def shown(result: dict[str, Any]) -> dict[str, Any]:
    """Return the median rate of a section, with the seconds of each repetition."""
    seconds, tokens = result["seconds"], result["tokens"]
    rates = [count / time for count, time in zip(tokens, seconds, strict=True)]
    first = round(result["first_s"], 2)
    return {
        "tokens_per_second": round(median(rates), 1),
        "first": first,
        "seconds": [round(s, 2) for s in seconds],
    }


def programs(url: str) -> dict[str, float]:
    """Return what the server says of its compiled programs and commands."""
    text = urllib.request.urlopen(f"{url}/metrics", timeout=30).read().decode()
    lines = re.findall(r"^(spmd_tx_\w*(?:program|compil|command)\w*(?:\{[^}]*\})?) ([\d.e+-]+)$", text, re.M)
    return {name: float(value) for name, value in lines if "_created" not in name}


if __name__ == "__main__":
    sys.exit(main())
