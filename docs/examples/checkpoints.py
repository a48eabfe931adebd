"""Save, resume, sample, publish, copy and download checkpoints: checkpoints.py URL MODEL FOLDER."""

import sys
import urllib.request
from pathlib import Path

import tinker
from tinker import types


def main(url: str, model: str, folder: str) -> None:
    service = tinker.ServiceClient(base_url=url)
    rest = tinker.RestClient(base_url=url)
    training = service.create_lora_training_client(model, rank=8).result()

    # Save to train on, with the optimizer's state. The name is free again in a week.
    step(training)
    saved = (
        training.save_state("step-1", ttl_seconds=7 * 24 * 3600, user_metadata={"step": "1"}).result().path
    )
    step(training)

    # Resume, in this session or in any other.
    resumed = service.create_training_client_from_state_with_optimizer(saved).result()
    print("resumed:", resumed.get_info().model_id)

    # Save to sample from.
    sampled = training.save_weights_for_sampler("step-2").result().path
    sampler = service.create_sampling_client(model_path=sampled).result()
    params = types.SamplingParams(max_tokens=4)
    print("sampled:", sampler.sample(prompt(), 1, params).result().sequences[0].tokens)

    # Let others read it, and keep it as long as it takes.
    rest.publish_checkpoint_from_tinker_path(sampled).result()
    rest.set_checkpoint_ttl_from_tinker_path(saved, None).result()

    # A copy of one's own, which shares the files and outlives the original.
    print("copied:", rest.copy_weights(saved, "archive").result())

    # A PEFT folder, for other programs.
    exported = training.save_weights_external("final", ttl_seconds=3600).result().path
    for name, link in rest.get_external_weights_urls(exported).result().urls.items():
        Path(folder).mkdir(parents=True, exist_ok=True)
        urllib.request.urlretrieve(link, Path(folder, name))
        print("downloaded:", Path(folder, name))

    for checkpoint in rest.list_user_checkpoints().result().checkpoints:
        print("listed:", checkpoint.checkpoint_type, checkpoint.tinker_path)
    rest.delete_checkpoint_from_tinker_path(exported).result()
    service.close("success").result()


def step(training: tinker.TrainingClient) -> None:
    targets = types.TensorData(data=[2, 3, 4], dtype="int64", shape=[3])
    weights = types.TensorData(data=[1.0, 1.0, 1.0], dtype="float32", shape=[3])
    datum = types.Datum(model_input=prompt(), loss_fn_inputs={"target_tokens": targets, "weights": weights})
    training.forward_backward([datum], "cross_entropy")
    training.optim_step(types.AdamParams(learning_rate=1e-4)).result()


def prompt() -> types.ModelInput:
    return types.ModelInput.from_ints([1, 2, 3])


if __name__ == "__main__":
    main(*sys.argv[1:])
