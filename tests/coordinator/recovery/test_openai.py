"""A stream in front of a server whose workers are lost."""

import json

from spmd_tx.demo import tiny_model
from tests.coordinator.server.test_serve import serving

BODY = {"model": "tiny", "prompt": [1, 2, 3], "n": 16, "max_tokens": 200, "seed": 5}


def test_a_stream_goes_on_when_workers_are_lost_and_repeats_nothing(tmp_path):
    model_dir = tiny_model.write(tmp_path / "model")
    with serving(model_dir, tmp_path / "data", decode_rows=4, decode_steps=2) as server:
        server.wait_until_ready()
        url = server.client.base_url.join("/oai/api/v1/completions")
        whole = server.client.post(url, json=BODY).json()["choices"]
        [worker], texts = server.workers(), [""] * len(whole)
        with server.client.stream("POST", url, json=BODY | {"stream": True}) as response:
            for line in response.iter_lines():
                if not line.startswith("data: {"):
                    continue
                if not any(texts):
                    worker.kill()
                choice = json.loads(line.removeprefix("data: "))["choices"][0]
                texts[choice["index"]] += choice["text"]
        assert texts == [choice["text"] for choice in whole]
        assert worker not in server.workers()
