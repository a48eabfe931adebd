"""Trains until it is killed: python -m tests.console.lasting_client URL KEY NAME."""

import sys

import tinker
from tinker import types

from tests.sdk.server import BASE_MODEL


def main(url: str, key: str, name: str) -> None:
    service = tinker.ServiceClient(base_url=url, api_key=key)
    trainer = service.create_lora_training_client(BASE_MODEL, rank=8, user_metadata={"name": name}).result()
    tokens = [1 + n % 300 for n in range(60)]
    inputs = {"target_tokens": tokens, "weights": [1.0] * len(tokens)}
    datum = types.Datum(model_input=types.ModelInput.from_ints(tokens), loss_fn_inputs=inputs)
    while True:
        passed = trainer.forward_backward([datum], "cross_entropy")
        trainer.optim_step(types.AdamParams(learning_rate=1e-3)).result()
        passed.result()


if __name__ == "__main__":
    main(*sys.argv[1:])
