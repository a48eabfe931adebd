from pathlib import Path

import msgspec
import pytest

from spmd_tx.coordinator.catalog.catalog import SamplerWeights
from spmd_tx.coordinator.checkpoints import files
from spmd_tx.coordinator.runtime.folder_names import folder_name
from spmd_tx.coordinator.sampling import versions
from spmd_tx.coordinator.sampling.bank import BASE_MODEL
from spmd_tx.coordinator.wire.checkpoint_paths import parse
from spmd_tx.errors import InvalidRequest, NotFound
from tests.coordinator.training.bench import running

A = "alice:train:0"
PATH = f"tinker://{A}/sampler_weights/w1"


@pytest.fixture
async def bench(tmp_path):
    async with running(tmp_path) as bench:
        bench.create(A, seed=7)
        await bench.result(bench.save_for_sampler(A, 1, "w1"))
        yield bench


async def sampler(bench, seq_id=0, path=PATH, session="bob"):
    return (await bench.catalog.add_sampler(session, seq_id, "tiny", SamplerWeights(path))).id


def folder_of(bench, version):
    return Path(bench.bank._versions[version].path)


def weights(folder):
    return float((folder / "adapter_model.safetensors").read_text())


async def test_a_sampler_of_the_base_model_needs_nothing(bench):
    assert await bench.version_of(await sampler(bench, path=None)) == BASE_MODEL


async def test_what_was_just_saved_is_on_the_device(bench):
    version = await bench.version_of(await sampler(bench))
    assert bench.bank.place(version).before == []


async def test_samplers_of_one_checkpoint_share_its_place(bench):
    first = await bench.version_of(await sampler(bench, 0))
    assert await bench.version_of(await sampler(bench, 1, session="carol")) == first
    assert len(list((bench.directory / "versions").iterdir())) == 1


async def test_a_deleted_checkpoint_stays_with_its_open_samplers(bench):
    version = await bench.version_of(await sampler(bench))
    await bench.checkpoints.delete(parse(PATH))
    assert weights(folder_of(bench, version)) == 7.0
    with pytest.raises(NotFound):
        await bench.version_of(await sampler(bench, 1))


async def test_an_overwritten_checkpoint_is_new_for_new_samplers_only(bench):
    old = await bench.version_of(await sampler(bench, 0))
    bench.train(A, 2, 4)
    bench.step(A, 3, learning_rate=1.0)
    await bench.result(bench.save_for_sampler(A, 4, "w1", overwrite=True))
    new = await bench.version_of(await sampler(bench, 1))
    assert await bench.version_of("bob:sample:0") == old != new
    assert weights(folder_of(bench, old)) == 7.0
    assert weights(folder_of(bench, new)) == bench.workers.weights[0] != 7.0


async def test_a_version_lives_until_its_last_session_has_ended(bench):
    version = await bench.version_of(await sampler(bench, session="bob"))
    assert await bench.version_of(await sampler(bench, session="carol")) == version
    assert bench.versions.end_session("alice") == []
    assert bench.versions.end_session("bob") == []
    assert bench.bank.knows(version)
    (abandoned,) = bench.versions.end_session("carol")
    assert not bench.bank.knows(version)
    assert weights(abandoned) == 7.0  # deleted only when no command reads it any more


async def test_a_superseded_version_is_given_up_with_its_folder(bench):
    for seq_id in (2, 3):
        await bench.result(bench.save_for_sampler(A, seq_id, sampling_session_seq_id=seq_id))
    old, new = "alice:sample:2", "alice:sample:3"
    for version in (old, new):
        assert await bench.version_of(version) == version
        (bench.directory / "versions" / folder_name(version)).mkdir()
    folders = [bench.directory / "versions" / folder_name(version) for version in (old, new)]

    bench.scheduler.retire([old])

    await bench.until(lambda: not folders[0].exists())
    assert folders[1].exists()
    with pytest.raises(InvalidRequest, match="newer ones followed"):
        await bench.version_of(old)
    assert await bench.version_of(new) == new


async def test_a_checkpoint_of_an_earlier_run_is_read_from_its_folder(bench):
    folder = next(bench.directory.glob("checkpoints/*/sampler_weights/w1"))
    bench.versions._published.clear()  # as after a restart
    version = await bench.version_of(await sampler(bench))
    (load,) = bench.bank.place(version).before
    assert load.name == "load_sampler"
    assert load.source.path != str(folder)
    assert weights(Path(load.source.path)) == 7.0


async def test_a_training_checkpoint_cannot_be_sampled(bench):
    saved = await bench.result(bench.save(A, 2, "state"))
    with pytest.raises(
        InvalidRequest, match="cannot be sampled; sample from one saved with save_weights_for_sampler"
    ):
        await bench.version_of(await sampler(bench, path=saved["path"]))


@pytest.mark.parametrize(
    "change, message",
    [
        ({"rank": 64}, "has rank 64 and this server takes at most 8.*--max-lora-rank"),
        ({"base_model": "other"}, "was trained on 'other', and this model is one of 'tiny'"),
        ({"files": {"adapter_model.safetensors": 10**6}}, "is damaged: .* instead of 1000000"),
    ],
)
async def test_a_checkpoint_that_does_not_fit_this_server_is_refused(bench, change, message):
    manifest = next(bench.directory.glob("checkpoints/*/sampler_weights/w1")) / files.MANIFEST
    manifest.write_bytes(msgspec.json.encode(msgspec.json.decode(manifest.read_bytes()) | change))
    with pytest.raises(InvalidRequest, match=message):
        await bench.version_of(await sampler(bench))


@pytest.mark.parametrize(
    "modules, groups",
    [
        ("q_proj k_proj v_proj o_proj gate_proj up_proj down_proj lm_head", (True, True, True)),
        ("q_a_proj kv_a_proj_with_mqa o_proj", (True, False, False)),
        ("gate_proj up_proj down_proj", (False, True, False)),
        ("unembed_tokens", (False, False, True)),
    ],
)
def test_an_adapter_on_disk_is_known_by_the_modules_that_it_trains(tmp_path, modules, groups):
    config = {"r": 4, "lora_alpha": 8.0, "target_modules": modules.split()}
    (tmp_path / "adapter_config.json").write_bytes(msgspec.json.encode(config))
    adapter = versions._read_adapter(tmp_path)
    assert adapter is not None
    assert (adapter.train_attn, adapter.train_mlp, adapter.train_unembed) == groups


async def test_what_could_not_be_sent_is_sent_again(bench):
    await bench.result(bench.save_for_sampler(A, 2, sampling_session_seq_id=0))
    write_out = versions.WriteOut(bench.versions, A)
    commands = write_out.commands()
    assert commands
    assert write_out.commands() == commands
    assert len(write_out.writing) == 1
