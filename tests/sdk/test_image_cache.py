"""Reinforcement on images, as recipes do it: each is stored once and encoded once."""

import json
import re

import httpx
import numpy as np
import pytest
import tinker
from tinker import types

from tests.sdk import seeing
from tests.sdk.examples import ADAM_STEP, SECONDS, drawn
from tests.sdk.server import BASE_MODEL, QUICKLY, serving
from tests.support.pictures import png

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]

PROMPTS, SAMPLES, STEPS = 64, 16, 2
TOKENS, ANSWER = 16, 4  # of an image, of a sample
OPTIONS = {"image_tokens": PROMPTS * TOKENS, "train_tokens": 1024, "decode_rows": 64, "environment": QUICKLY}


def test_64_images_are_encoded_once_in_two_steps_of_16_samples_each(tmp_path):
    model = seeing.write_model(tmp_path / "model")
    path = model / "preprocessor_config.json"
    processor = json.loads(path.read_text())
    processor["size"]["shortest_edge"] = 32 * 32 * TOKENS  # pixels: small pictures stay small
    path.write_text(json.dumps(processor))
    files = [png(128, 128, seed=number) for number in range(PROMPTS)]
    prompts = [
        [seeing.text(5, number), seeing.image(file, TOKENS), seeing.text(6, number)]
        for number, file in enumerate(files)
    ]
    with serving(model, tmp_path / "data", **OPTIONS) as server:
        server.wait_until_ready()
        with tinker.ServiceClient(base_url=server.url, api_key="tml-test") as service:
            trainer = service.create_lora_training_client(BASE_MODEL, rank=4, seed=1).result(SECONDS)
            numbers = 0  # that were sent
            for step in range(STEPS):
                data = rollouts(trainer, prompts, step)
                numbers += sum((1 + len(each.loss_fn_inputs)) * each.model_input.length for each in data)
                gradient = trainer.forward_backward(data, "importance_sampling")
                trainer.optim_step(ADAM_STEP).result(SECONDS)
                assert np.isfinite(gradient.result(SECONDS).metrics["loss:sum"])
        text = httpx.get(f"{server.url}/metrics").text
        (encoded,) = re.findall(r'^spmd_tx_images_encoded_total\{group="main"\} (\S+)', text, re.MULTILINE)
        (decoded,) = re.findall(r"^spmd_tx_images_decoded_total (\S+)", text, re.MULTILINE)
    assert float(encoded) == float(decoded) == PROMPTS
    images = sum(map(len, files))
    stored = sum(path.stat().st_size for path in (server.data_dir / "payloads").glob("*.zst"))
    print(f"{stored} bytes are stored of {images} of images and {4 * numbers} of numbers")
    assert images <= stored <= 1.2 * images + 4 * numbers


def rollouts(
    trainer: tinker.TrainingClient, prompts: list[list[types.ModelInputChunk]], step: int
) -> list[types.Datum]:
    """Sample from the present weights, and make datums that reinforce low tokens."""
    sampler = trainer.save_weights_and_get_sampling_client().result(SECONDS)
    params = drawn(max_tokens=ANSWER, seed=step)
    asked = [sampler.sample(types.ModelInput(chunks=each), SAMPLES, params) for each in prompts]
    data = list[types.Datum]()
    for chunks, answers in zip(prompts, asked, strict=True):
        ahead = [0.0] * (len(seeing.ids(chunks)) - 1)
        for sample in answers.result(4 * SECONDS).sequences:
            advantages = [1.0 if token < 256 else -1.0 for token in sample.tokens]
            inputs = {
                "logprobs": [*ahead, *(sample.logprobs or ())],
                "advantages": [*ahead, *advantages],
            }
            data.append(seeing.datum(seeing.followed(chunks, sample.tokens), **inputs))
    return data
