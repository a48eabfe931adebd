"""Measures what images cost: python -m tools.bench.images

Prints how many images of 360 x 480 pixels a child process decodes in a second, the milliseconds until a
sample with an image of 1 MB has been taken, beside one of text, and the milliseconds of a training step on 64
images of 224 x 224 pixels that devices have, beside one on as many tokens of text: medians and quartiles of
rounds in which both take turns, after rounds in which programs compile.
"""

import argparse
import asyncio
import base64
import json
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import tinker
from PIL import Image
from tinker import types

from spmd_tx.bounds import Bounds
from spmd_tx.coordinator.images.prepared import ImageKey, PreparedImages, StoredImage
from spmd_tx.demo import tiny_model
from spmd_tx.images.headers import read_header
from spmd_tx.images.processor import ImageProcessor
from tests.sdk.examples import ADAM_STEP, SECONDS, supervised
from tests.sdk.server import AS_USUAL, BASE_MODEL, Server, serving
from tests.support.pictures import encoded, jpeg, noise

DECODED = 200  # images
PICTURES, SIDE, TEXT = 64, 224, 20  # images of a step, their pixels, and the tokens of text behind each
COMPILING = 3  # rounds that are not counted
SPEC = tiny_model.Spec(family="qwen3_vl", sees=True, max_positions=4096)
PROCESSOR = ImageProcessor()

Prepare = Callable[[], Callable[[], Any]]  # what is measured is what this returns


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    rounds = parser.parse_args().rounds
    print(f"decoding: {asyncio.run(decoded_per_second()):.0f} images/s of 360 x 480", flush=True)
    with tempfile.TemporaryDirectory() as name:
        model = tiny_model.write(Path(name) / "model", SPEC)
        options = {"train_tokens": 2048, "image_tokens": 16384, "environment": AS_USUAL}
        with serving(model, Path(name) / "data", **options) as server:
            server.wait_until_ready()
            show("taking a sample", posts(server), rounds)
            show("training step", steps(server), rounds)


class _Files:
    """Is the log of images, all of which are the same file."""

    def __init__(self, content: bytes) -> None:
        self._content = content

    async def key(self, session_id: str, digest: str) -> ImageKey:
        return ImageKey(session_id, digest)

    async def read(self, key: ImageKey) -> StoredImage:
        return StoredImage(self._content, None)

    async def note_patches(self, key: ImageKey, patches: str) -> None:
        pass


async def decoded_per_second() -> float:
    """Return how many images one child process decodes, which is all that an owner has at a time."""
    content = jpeg(360, 480)
    prepared = PreparedImages(_Files(content), PROCESSOR, Bounds())
    await prepared.get(ImageKey("alice", "first"), tokens_of(content))
    began = time.monotonic()
    keys = [ImageKey("alice", str(number)) for number in range(DECODED)]
    await asyncio.gather(*(prepared.get(key, tokens_of(content)) for key in keys))
    seconds = time.monotonic() - began
    await prepared.close()
    return DECODED / seconds


def tokens_of(content: bytes) -> int:
    header = read_header(content)
    return PROCESSOR.resized(header.height, header.width).tokens


def posts(server: Server) -> dict[str, Prepare]:
    """Return how a sample is sent whose image the server has not seen yet, and one of text."""
    client = httpx.Client(
        base_url=f"{server.url}/api/v1/", headers={"X-API-Key": "tml-test"}, timeout=SECONDS
    )

    def call(path: str, **body: Any) -> dict[str, Any]:
        return client.post(path, json=body).raise_for_status().json()

    session = call("create_session", tags=[], sdk_version="0.38.0")["session_id"]
    asked = {"session_id": session, "sampling_session_seq_id": 0, "base_model": BASE_MODEL}
    sampler = call("create_sampling_session", **asked)["sampling_session_id"]
    numbers, under_way = iter(range(1, 10**6)), list[str]()
    text = {"type": "encoded_text", "tokens": [5, 6, 7]}

    def prepared(chunks: Sequence[dict[str, Any]]) -> Callable[[], Any]:
        while under_way:  # what is measured has the server for itself
            answer = client.post("retrieve_future", json={"request_id": under_way[-1]})
            if answer.status_code != httpx.codes.REQUEST_TIMEOUT:
                assert b'"error"' not in answer.raise_for_status().content, answer.text
                under_way.pop()
        body = {"sampling_session_id": sampler, "seq_id": next(numbers), "num_samples": 1}
        body |= {"prompt": {"chunks": [*chunks, text]}, "sampling_params": {"max_tokens": 1}}
        sent = {"content": json.dumps(body).encode(), "headers": {"Content-Type": "application/json"}}

        def post() -> None:
            under_way.append(client.post("asample", **sent).raise_for_status().json()["request_id"])

        return post

    def of_image() -> Callable[[], Any]:
        file = megabyte(next(numbers))
        image = {"type": "image", "format": "jpeg", "data": base64.b64encode(file).decode()}
        return prepared([image | {"expected_tokens": tokens_of(file)}])

    return {"image of 1 MB": of_image, "text": lambda: prepared([])}


def megabyte(seed: int) -> bytes:
    """Return a JPEG of about 1 MB: fine noise, which is hardly compressed."""
    grains = np.random.default_rng(seed).integers(-40, 41, (960, 1280, 3))
    numbers = np.asarray(noise(960, 1280, seed)) + grains
    return encoded(Image.fromarray(numbers.clip(0, 255).astype(np.uint8)), "jpeg", quality=95)


def steps(server: Server) -> dict[str, Prepare]:
    """Return how a step is taken on images, and on as many tokens of text."""
    service = tinker.ServiceClient(base_url=server.url, api_key="tml-test")
    trainer = service.create_lora_training_client(BASE_MODEL, rank=8, seed=1).result(SECONDS)
    random = np.random.default_rng(0)
    seen, read = [], []
    for number in range(PICTURES):
        content = jpeg(SIDE, SIDE, seed=number)
        tokens = random.integers(0, SPEC.vocab_size, TEXT).tolist()
        seen.append(behind(content, tokens))
        read.append(supervised(random.integers(0, SPEC.vocab_size, tokens_of(content) + TEXT).tolist()))

    def step(data: list[types.Datum]) -> None:
        gradient, update = trainer.forward_backward(data, "cross_entropy"), trainer.optim_step(ADAM_STEP)
        gradient.result(SECONDS)
        update.result(SECONDS)

    return {"images": lambda: partial(step, seen), "text": lambda: partial(step, read)}


def behind(content: bytes, tokens: list[int]) -> types.Datum:
    """Make a datum whose text follows an image."""
    count = tokens_of(content)
    image = types.ImageChunk(data=content, format="jpeg", expected_tokens=count)
    text = types.EncodedTextChunk(tokens=tokens[:-1])
    weights = [0.0] * (count - 1) + [1.0] * len(tokens)
    inputs = {"target_tokens": [0] * (count - 1) + tokens, "weights": weights}
    return types.Datum(model_input=types.ModelInput(chunks=[image, text]), loss_fn_inputs=inputs)


def show(what: str, ways: dict[str, Prepare], rounds: int) -> None:
    """Measure what takes turns, each prepared before its time begins, and print it."""
    found: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(COMPILING + rounds):
        for name, prepare in ways.items():
            act = prepare()
            began = time.monotonic()
            act()
            if number >= COMPILING:
                found[name].append(1e3 * (time.monotonic() - began))
    for name, each in found.items():
        low, middle, high = np.percentile(each, [25, 50, 75])
        print(f"{what}, {name}: {middle:.1f} ms ({low:.1f} to {high:.1f})", flush=True)
    first, second = (np.median(each) for each in found.values())
    print(f"{what}: {first / second:.2f} times", flush=True)


if __name__ == "__main__":
    main()
