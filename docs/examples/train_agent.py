"""Train an agent by what it samples through Anthropic's client.

    pip install anthropic
    spmd-tx make-model models/tiny && spmd-tx serve --base-model models/tiny
    python docs/examples/train_agent.py --base-model models/tiny

The agent is a loop as everybody writes it: it asks, runs the tools that the model calls, and sends back what
they say. It knows nothing of training. Its task is a toy: a key is in one of five drawers, and only rewards
tell in which. Replace `TASK`, `TOOL` and `Room` by your own.
"""

import argparse
import os
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import anthropic
import httpx
import numpy as np
import tinker
from tinker import types

TASK = "Find the key."
TOOL: Any = {
    "name": "open",
    "description": "Open a drawer.",
    "input_schema": {
        "type": "object",
        "properties": {"drawer": {"type": "integer", "enum": [1, 2, 3, 4, 5]}},
        "required": ["drawer"],
        "additionalProperties": False,
    },
}
DRAWER = 2  # with the key
AGENTS = 32  # of one step
ENOUGH = 0.95  # mean reward


class Room:
    """Holds the drawers. They are locked when one of them was opened."""

    def __init__(self) -> None:
        self.is_locked, self.reward = False, 0.0

    def open(self, drawer: object) -> str:
        self.is_locked, self.reward = True, float(drawer == DRAWER)
        return "There it is." if self.reward else "It is empty."


def run_agent(client: anthropic.Anthropic, model: str, room: Room) -> None:
    """Let a model call tools until its task is over."""
    messages: list[Any] = [{"role": "user", "content": TASK}]
    while not room.is_locked:
        # Every answer is a call of the tool: the model need not learn its form, only what to say.
        answer = client.messages.create(
            model=model,
            max_tokens=256,
            messages=messages,
            tools=[TOOL],
            tool_choice={"type": "any"},
            thinking={"type": "disabled"},
        )
        results = [
            {"type": "tool_result", "tool_use_id": block.id, "content": room.open(**block.input)}
            for block in answer.content
            if block.type == "tool_use"
        ]
        if not results:
            return  # the answer was cut off
        messages += [{"role": "assistant", "content": answer.content}, {"role": "user", "content": results}]


class Trajectories:
    """Rewards what agents have done below their base URLs, and returns it as sequences."""

    def __init__(self, url: str, api_key: str) -> None:
        self.url, self.api_key = url, api_key
        headers = {"x-api-key": api_key}
        self.api = httpx.Client(base_url=f"{url}/api/v1/trajectories", headers=headers, timeout=300)

    def play(self, name: str, model: str) -> float:
        """Run one agent in a trajectory of this name, and reward it."""
        made = self.api.post("", json={"name": name, "model": model}).raise_for_status().json()
        room = Room()
        base_url = f"{self.url}/anthropic/api/in/{name}"
        with anthropic.Anthropic(base_url=base_url, api_key=self.api_key) as client:
            run_agent(client, model, room)
        self.api.post(f"/{made['id']}/rewards", json={"reward": room.reward}).raise_for_status()
        return room.reward

    def segments(self, name: str) -> list[dict[str, Any]]:
        """Return what the trajectories whose names begin so have sampled."""
        answer = self.api.post("/sequences", json={"name": name}).raise_for_status().json()
        return answer["segments"]


def datum(segment: dict[str, Any], advantage: float) -> types.Datum:
    """Make a segment an example whose sampled tokens have this advantage."""
    sampled = np.array(segment["sampled"][1:], np.float32)
    return types.Datum(
        model_input=types.ModelInput.from_ints(segment["tokens"][:-1]),
        loss_fn_inputs={
            "target_tokens": segment["tokens"][1:],
            "logprobs": segment["logprobs"][1:],
            "advantages": (sampled * advantage).tolist(),
        },
    )


def train_step(
    trainer: tinker.TrainingClient, trajectories: Trajectories, run: str, learning_rate: float
) -> float:
    """Let agents play with the weights as they are, train on what they did, and return their mean reward."""
    weights = trainer.save_weights_for_sampler(run).result().path
    names = [f"{run}.{number}" for number in range(AGENTS)]
    with ThreadPoolExecutor(AGENTS) as pool:
        rewards = list(pool.map(lambda name: trajectories.play(name, weights), names))
    mean = float(np.mean(rewards))
    data = [datum(segment, segment["reward"] - mean) for segment in trajectories.segments(f"{run}.")]
    trainer.forward_backward(data, "importance_sampling")
    trainer.optim_step(types.AdamParams(learning_rate=learning_rate)).result()
    return mean


def main() -> None:
    """Train until the agents find the key."""
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--base-url", default="http://127.0.0.1:8000")
    parser.add_argument("--base-model", required=True, help="as the server knows it")
    parser.add_argument("--learning-rate", type=float, default=0.005)
    parser.add_argument("--steps", type=int, default=40, help="at most")
    arguments = parser.parse_args()

    api_key, started = os.environ.get("TINKER_API_KEY", "tml-local"), time.monotonic()
    trajectories = Trajectories(arguments.base_url, api_key)
    service = tinker.ServiceClient(base_url=arguments.base_url, api_key=api_key)
    trainer = service.create_lora_training_client(arguments.base_model, rank=16, seed=0).result()
    for step in range(arguments.steps):
        run = f"drawers-{os.getpid()}-{step}"
        reward = train_step(trainer, trajectories, run, arguments.learning_rate)
        print(f"step {step}: reward {reward:.2f} after {time.monotonic() - started:.0f} s", flush=True)
        if reward >= ENOUGH:
            break
    service.close("success").result()


if __name__ == "__main__":
    main()
