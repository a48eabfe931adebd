"""Measures tokens per second of every family beside Qwen3 of the same widths.

    python -m tools.bench.families --publish

Random models of four layers of width 256 in float32, each served by a process of its own on this machine's
CPUs: training on 32 rows of 256 tokens, prefill of 16 prompts of 512, decode of 16 sequences of 128 tokens.
Mixtures have eight experts, of which a token gets two.
"""

import argparse
import json
import math
import os
import tempfile
from dataclasses import replace
from pathlib import Path
from statistics import median

from rich.console import Console

from spmd_tx.demo import tiny_model
from spmd_tx.demo.run import ServerLog, serving
from spmd_tx.demo.tiny_families import FAMILIES, stored_shapes
from spmd_tx.models.families.registry import declare
from tools.bench import tables
from tools.bench.models import SPECS
from tools.bench.sections import LOADS, Limits, Result, Sections

PAGE = Path("docs/engineering_notes/families.md")
MARK = "tools.bench.families"
HEADER = ("family", "parameters", "training", "prefill", "decode", "training / Qwen3", "decode / Qwen3")
LIMITS = Limits(repeats=5, seconds=15.0)
LOAD = replace(LOADS["tiny"], copies=2)
PROMPTS, PROMPT_TOKENS = 16, 512
OPTIONS = {"SPMD_TX_MAX_CONTEXT_LENGTH": "1024"}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", help="names of families, with commas between them")
    parser.add_argument("--publish", action="store_true", help=f"write the table into {PAGE}")
    options = parser.parse_args()
    names = options.only.split(",") if options.only else list(FAMILIES)
    found: dict[str, tuple[int, list[float]]] = {}
    for name in names:
        found[name] = measured(name)
        print(name, *found[name], flush=True)
    rows = [line(name, found) for name in names]
    print(tables.text(HEADER, rows))
    if options.publish:
        tables.publish(PAGE, MARK, tables.markdown(HEADER, rows))


def measured(name: str) -> tuple[int, list[float]]:
    """Return the parameters, and tokens per second of training, prefill and decode."""
    spec = replace(SPECS["tiny"], family=name)
    with tempfile.TemporaryDirectory() as folder:
        model = tiny_model.write(Path(folder) / "model", spec)
        shapes = stored_shapes(declare(json.loads((model / "config.json").read_text())))
        parameters = sum(math.prod(shape) for shape in shapes.values())
        log = ServerLog(Path(folder) / "server.log")
        with serving(str(model), log, Console(quiet=True), dict(os.environ) | OPTIONS) as url:
            sections = Sections(url, str(model), LOAD, LIMITS, lambda: 0.0)
            speeds = [
                rate(sections.train_uniform()),
                rate(prefill(sections)),
                rate(sections.sample_uniform()),
            ]
            sections.client.done(sections.client.service.close("success"))  # ends its heartbeats
    return parameters, speeds


def prefill(sections: Sections) -> Result:
    """Prompts that no cache knows, one token each."""
    sampler = sections.client.base_sampler()

    def run() -> int:
        prompts = [sections.client.text(PROMPT_TOKENS) for _ in range(PROMPTS)]
        sections.client.sample(sampler, prompts, [1] * PROMPTS, 1)
        return PROMPTS * PROMPT_TOKENS

    return sections.repeat(run, warmup=2)


def rate(result: Result) -> float:
    """Return the median of tokens per second."""
    return median(count / took for count, took in zip(result["tokens"], result["seconds"], strict=True))


def line(name: str, found: dict[str, tuple[int, list[float]]]) -> list[str]:
    """Put a family beside the Qwen3 that has experts, if it has, or that has none."""
    parameters, speeds = found[name]
    config = tiny_model.model_config(replace(SPECS["tiny"], family=name), {})
    like = "qwen3_moe" if declare(config).n_experts else "qwen3"
    beside = found.get(like)
    ratios = ["-", "-"] if beside is None else [f"{speeds[i] / beside[1][i]:.2f}" for i in (0, 2)]
    return [name, f"{parameters / 1e6:.1f} M", *map(tables.number, speeds), *ratios]


if __name__ == "__main__":
    main()
