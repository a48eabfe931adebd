"""Weights on their way from the group that trains to one that samples: of mixtures, and damaged ones."""

import time
from pathlib import Path

import pytest
import tinker

from spmd_tx.demo import tiny_model
from tests.sdk.examples import CONTEXT, SECONDS, VOCABULARY, batch
from tests.sdk.server import BASE_MODEL, generation_of, groups_of
from tests.sdk.test_sampling_groups import (
    ROLLOUTS,
    assert_ends_in_order,
    assert_same_through_a_kill,
    both_ready,
    drawn_by,
    serving_both,
)

MIXTURE = tiny_model.Spec(
    n_heads=4, n_kv_heads=2, d_ff=32, n_experts=8, vocab_size=VOCABULARY, max_positions=CONTEXT
)


@pytest.mark.slow
@pytest.mark.parametrize("expert_lora", ["shared-outer", "per-expert"])
def test_samples_of_a_new_mixture_come_from_the_other_group_also_when_it_is_killed(tmp_path, expert_lora):
    model = tiny_model.write(tmp_path / "model", MIXTURE)
    with serving_both(model, tmp_path / "data", expert_lora=expert_lora) as address:
        assert_same_through_a_kill(address)
        assert_ends_in_order(address)


@pytest.mark.slow
def test_a_damaged_version_fails_its_samples_and_nothing_else(model_dir, tmp_path):
    """Its bit flips between the group that has written it and the one that reads it."""
    with serving_both(model_dir, tmp_path / "data") as address:
        both_ready(address)
        generations = {group: generation_of(address.server, group) for group in ("main", ROLLOUTS)}
        with tinker.ServiceClient(base_url=address.server.url, api_key="tml-test") as service:
            trainer = service.create_lora_training_client(BASE_MODEL, rank=8, seed=1).result(SECONDS)
            versions = tmp_path / "data" / "versions"
            sound = trainer.save_weights_and_get_sampling_client().result(SECONDS)
            expected, known = drawn_by(sound), {*versions.iterdir()}
            trainer.forward_backward(batch(seed=1), "cross_entropy")
            trainer.optim_step(tinker.AdamParams(learning_rate=0.01)).result(SECONDS)
            damaged = trainer.save_weights_and_get_sampling_client().result(SECONDS)
            folder = flip_a_bit(versions, known)
            for _ in range(2):
                with pytest.raises(tinker.RequestFailedError) as failed:
                    drawn_by(damaged)
                assert f"{folder.name}/adapter_model.safetensors is damaged" in str(failed.value)
                assert failed.value.category == tinker.types.RequestErrorCategory.Server
            assert drawn_by(sound) == expected
            trainer.forward_backward(batch(seed=2), "cross_entropy")
            trainer.optim_step(tinker.AdamParams(learning_rate=0.01)).result(SECONDS)
            newer = trainer.save_weights_and_get_sampling_client().result(SECONDS)
            assert drawn_by(newer) != expected
            states = {name: each["state"] for name, each in groups_of(address.server).items()}
            assert states == {"main": "ready", ROLLOUTS: "ready"}
            assert {group: generation_of(address.server, group) for group in generations} == generations
        assert f"{folder.name}/adapter_model.safetensors is damaged" in address.server.log
        address.server.terminate()
        assert list(versions.iterdir()) == []


def flip_a_bit(versions: Path, known: set[Path]) -> Path:
    """Damage the weights of a version that is not known, as soon as it is there; return its folder."""
    deadline = time.monotonic() + SECONDS
    while not (new := [each for each in versions.iterdir() if each not in known and each.name[0] != "."]):
        assert time.monotonic() < deadline, "nothing was written"
        time.sleep(0.05)
    (folder,) = new
    file = folder / "adapter_model.safetensors"
    content = bytearray(file.read_bytes())
    content[-1000] ^= 4
    file.write_bytes(content)
    return folder
