"""Measures how fast answers with a grammar are drawn: python -m tools.bench.constrained

Prints the tokens per second of free answers, and the share of it that answers with a grammar reach, for one
sample and for eight together: median and quartiles of rounds in which both take turns, after rounds in which
programs compile. A random model is refused all the time; one that was trained to write what the schema asks
for keeps to it by itself, in nearly all answers: the share is printed, too.
"""

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import tinker
from tinker import types
from tokenizers import Tokenizer

from spmd_tx.coordinator.agent.layout import TOKENIZER
from spmd_tx.coordinator.grammar.call_grammars import COMPACT
from spmd_tx.demo import tiny_model
from tests.sdk.examples import SECONDS, supervised
from tests.sdk.server import AS_USUAL, BASE_MODEL, serving

PROMPT = "one"
TOKENS = 200  # of an answer
TOGETHER = 1, 8  # samples
STEPS, RATE = 600, 1e-2  # of training
LEARNED = 5e-4  # nats per token: nine of ten answers are the text
COMPILING = 3  # rounds that are not counted
ANSWERS = 64  # of which the share is printed that keeps to the schema
TEXT = json.dumps({"items": [{"n": n, "of": f"a{n}b"} for n in range(10)]})
ITEM = {
    "type": "object",
    "properties": {"n": {"type": "integer"}, "of": {"type": "string"}},
    "required": ["n", "of"],
    "additionalProperties": False,
}
SCHEMA = {
    "type": "object",
    "properties": {"items": {"type": "array", "items": ITEM, "minItems": 10}},
    "required": ["items"],
    "additionalProperties": False,
}
OF_SCHEMA = {"grammar": f"start: %json {json.dumps(SCHEMA | {'x-guidance': COMPACT})}"}
GRAMMARS = {
    "any text": {"regex": r"(.|\n)*"},
    "letters and digits": {"regex": "[a-z0-9]{400}"},
    "JSON of a schema": OF_SCHEMA,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    rounds = parser.parse_args().rounds
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = tiny_model.write(folder / "model")
        with serving(model, folder / "data", environment=AS_USUAL) as server:
            server.wait_until_ready()
            headers = {"x-api-key": "tml-bench"}
            with httpx.Client(base_url=server.url, headers=headers, timeout=SECONDS) as http:
                for what, grammar in GRAMMARS.items():
                    compare(http, f"random model, {what}", {"model": BASE_MODEL}, grammar, rounds)
                obedient = {"model": trained(server.url, model)}
                print(f"obedient model: {kept(http, obedient):.0%} of its free answers begin as the text")
                compare(http, "obedient model, JSON of a schema", obedient, OF_SCHEMA, rounds)


def compare(
    http: httpx.Client, what: str, asked: dict[str, Any], grammar: dict[str, str], rounds: int
) -> None:
    """Print how fast answers are with and without a grammar."""
    for samples in TOGETHER:
        found = list[tuple[float, float]]()
        for seed in range(rounds + COMPILING):
            body = asked | {"n": samples, "seed": seed}
            found.append((tokens_per_second(http, body), tokens_per_second(http, body | grammar)))
        free, constrained = np.array(found[COMPILING:]).T
        low, middle, high = np.quantile(constrained / free, [0.25, 0.5, 0.75])
        print(
            f"{what}, {samples} at once: free {np.median(free):.0f} tokens/s, "
            f"constrained {middle:.2f} of it ({low:.2f} to {high:.2f})",
            flush=True,
        )


def tokens_per_second(http: httpx.Client, asked: dict[str, Any]) -> float:
    body = {"prompt": PROMPT, "max_tokens": TOKENS, "temperature": 1, **asked}
    began = time.perf_counter()
    answer = http.post("/oai/api/v1/completions", json=body).raise_for_status().json()
    return answer["usage"]["completion_tokens"] / (time.perf_counter() - began)


def kept(http: httpx.Client, asked: dict[str, Any]) -> float:
    """Return the share of free answers that are the beginning of the learned text."""
    body = {"prompt": PROMPT, "max_tokens": TOKENS, "temperature": 1, "n": ANSWERS, "seed": 1, **asked}
    choices = http.post("/oai/api/v1/completions", json=body).raise_for_status().json()["choices"]
    return sum(TEXT.startswith(choice["text"]) for choice in choices) / ANSWERS


def trained(url: str, folder: Path) -> str:
    """Return the path of weights that write a text of the schema."""
    tokenizer = Tokenizer.from_file(str(folder / TOKENIZER))
    prompt, tokens = (tokenizer.encode(text).ids for text in (PROMPT, TEXT + "<|im_end|>"))
    data = [supervised([*prompt, *tokens], [0.0] * (len(prompt) - 1) + [1.0] * len(tokens))]
    with tinker.ServiceClient(base_url=url, api_key="tml-bench") as service:
        trainer = service.create_lora_training_client(BASE_MODEL, rank=16, seed=1).result(SECONDS)
        loss, steps = float("inf"), 0
        while loss > LEARNED and steps < STEPS:
            gradient = trainer.forward_backward(data, "cross_entropy")
            trainer.optim_step(types.AdamParams(learning_rate=RATE)).result(SECONDS)
            loss, steps = gradient.result(SECONDS).metrics["loss:sum"] / len(tokens), steps + 1
        assert loss <= LEARNED, f"loss {loss:.3f} after {steps} steps"
        return trainer.save_weights_for_sampler("obedient").result(SECONDS).path


if __name__ == "__main__":
    main()
