"""Every command once, on a model directory: what is saved and loaded again trains and samples as before."""

import errno
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest

from spmd_tx.demo import tiny_model
from spmd_tx.errors import ForeignWeights
from spmd_tx.protocol import commands
from spmd_tx.protocol.commands import AdapterSpec, LossInputs, PackedRows
from spmd_tx.protocol.places import Idle
from spmd_tx.protocol.reports import Written
from spmd_tx.worker.engine import Engine
from spmd_tx.worker.programs.compiled import Programs
from tests.support import moves
from tests.support.tiny_engine import to_numpy
from tests.support.tiny_setup import tiny_setup

pytestmark = pytest.mark.usefixtures("quickly_compiled")

SPEC = tiny_model.Spec(n_layers=2, n_kv_heads=2, vocab_size=272)
MODELS = {  # with their meshes, and whether fsdp splits the base weights
    "dense": (SPEC, (2, 1, 4), "yes"),
    "mixture": (replace(SPEC, d_ff=32, n_experts=8), (1, 2, 4), "no"),
}
TWO, FOUR = AdapterSpec(rank=2, train_attn=False), AdapterSpec(rank=4)
LENGTH, PAGE_SIZE, STEPS = 64, 8, 8
FIRST, OTHER = 0, 1  # training slots
NOBODY = -1
TOLERANCE = 1e-5
SECONDS = 60.0  # for a folder to be written


@pytest.fixture(scope="module", params=["dense", pytest.param("mixture", marks=pytest.mark.slow)])
def kind(request):
    return request.param


@pytest.fixture(scope="module")
def model_dir(kind, tmp_path_factory):
    return tiny_model.write(tmp_path_factory.mktemp("engine") / "model", MODELS[kind][0])


def start(model_dir: Path, mesh, shard_base_weights="auto", max_rank=4) -> Engine:
    setup = tiny_setup(
        model_dir=str(model_dir),
        dtype="float32",
        **dict(zip(("fsdp", "ep", "tp"), mesh, strict=True)),
        adapter_slots=2,
        max_rank=max_rank,
        page_size=PAGE_SIZE,
        kv_cache_tokens=128,
        decode_rows=4,
        decode_steps=STEPS,
        compilation_cache="",
        idle_adapters=str(model_dir.parent / "idle"),
        shard_base_weights=shard_base_weights,
    )
    return Engine.start(setup, Programs(lambda _: None), lambda _: None, REPORTS)


@pytest.fixture(scope="module")
def engine(kind, model_dir):
    return start(model_dir, *MODELS[kind][1:])


def create(engine: Engine, slot: int, adapter: AdapterSpec, seed: int = 2**40 + 3) -> None:
    engine.execute(moves.create_adapter(slot, seed, adapter))


def batch(engine: Engine, slot: int, seed: int = 0) -> dict[str, PackedRows | LossInputs]:
    """One row of cross_entropy on the last data shard."""
    shards = engine.setup.fsdp * engine.setup.ep
    shape = (shards, LENGTH)
    tokens, targets, segments, positions = np.zeros((4, *shape), np.int32)
    sequence = np.random.default_rng(seed).integers(0, SPEC.vocab_size, LENGTH + 1)
    tokens[-1], targets[-1], segments[-1], positions[-1] = sequence[:-1], sequence[1:], 1, np.arange(LENGTH)
    slots, zeros = np.zeros(shards, np.int32), np.zeros(shards, np.float32)
    slots[-1] = slot
    weights = (segments > 0).astype(np.float32)
    nothing = np.zeros(shape, np.float32)
    kinds = np.zeros(shards, np.int32)
    return {
        "rows": PackedRows(
            tokens=tokens, targets=targets, segments=segments, positions=positions, slots=slots
        ),
        "loss": LossInputs(
            kinds=kinds,
            clip_low=nothing,
            clip_high=nothing,
            beta=zeros,
            kl_coeff=zeros,
            weights=weights,
            advantages=nothing,
            sampling_logprobs=nothing,
        ),
    }


def forward(engine: Engine, slot: int) -> np.ndarray:
    return np.asarray(engine.execute(commands.Forward(**batch(engine, slot)))[0]["logprobs"])[-1]


def train(engine: Engine, slot: int, steps: int = 2) -> list[float]:
    """The loss before each step."""
    losses = []
    for _ in range(steps):
        arrays, _ = engine.execute(commands.ForwardBackward(**batch(engine, slot)))
        losses.append(float(np.sum(np.asarray(arrays["losses"])[-1])))
        hyper = {"learning_rate": 0.01, "beta1": 0.9, "beta2": 0.95, "eps": 1e-12}
        step = commands.OptimStep(slot=slot, weight_decay=0.0, grad_clip_norm=0.0, **hyper)
        _, metrics = engine.execute(step)
        assert metrics["applied"]
        assert metrics["grad_norm"] > 0
        of_groups = [metrics[f"grad_norm_{group}"] for group in ("attn", "mlp", "unembed")]
        np.testing.assert_allclose(np.sqrt(np.square(of_groups).sum()), metrics["grad_norm"], rtol=1e-5)
    return losses


Drawn = tuple[list[int], np.ndarray]  # tokens; logprobs of the prompt and of these


def sample(engine: Engine, bank: int) -> Drawn:
    """One sequence, in the last data shard."""
    shards = engine.setup.fsdp * engine.setup.ep
    return sample_in_every_shard(engine, [NOBODY] * (shards - 1) + [bank])[-1]


def sample_in_every_shard(engine: Engine, banks: list[int]) -> list[Drawn]:
    """The same prompt and seed in each data shard, with an adapter of its own; NOBODY's row is dead."""
    shards, alive = len(banks), np.array([bank != NOBODY for bank in banks], np.int32)
    prompt = np.random.default_rng(5).integers(0, SPEC.vocab_size, 11).astype(np.int32)
    count, pages = len(prompt) - 1, np.arange(1, 5, dtype=np.int32)
    tokens, targets, segments, positions, where = np.zeros((5, shards, LENGTH), np.int32)
    tokens[:, :count], targets[:, :count], segments[:, :count] = prompt[:-1], prompt[1:], 1
    positions[:, :count] = np.arange(count)
    where[:, :count] = pages[np.arange(count) // PAGE_SIZE]
    slots = np.array(banks, np.int32) * alive
    rows = PackedRows(tokens=tokens, targets=targets, segments=segments, positions=positions, slots=slots)
    copies = np.zeros((shards, 2), np.int32)
    prefill = commands.Prefill(rows=rows, pages=where, copies=copies, logprobs=True)
    prompt_arrays, _ = engine.execute(prefill)
    decode = commands.Decode(
        steps=STEPS,
        source=np.full(shards, -1, np.int32),
        tokens=prompt[-1] * alive,
        positions=count * alive,
        remaining=STEPS * alive,
        slots=slots,
        seeds=np.full((shards, 2), 7, np.uint32),
        temperatures=np.ones(shards, np.float32),
        top_k=np.full(shards, SPEC.vocab_size, np.int32),
        top_p=np.ones(shards, np.float32),
        stop_tokens=np.full((shards, commands.STOP_TOKENS), -1, np.int32),
        pages=np.tile(pages, shards),
        page_counts=np.full(shards, len(pages), np.int32),
        page_places=np.zeros(shards, np.int32),
    )
    arrays = to_numpy(engine.execute(decode)[0])
    first = np.asarray(prompt_arrays["logprobs"])[:, :count]
    return [
        (arrays["tokens"][:, row].tolist(), np.append(first[row], arrays["logprobs"][:, row]))
        for row in range(shards)
    ]


def assert_same_sample(actual, expected, tolerance=0.0):
    assert actual[0] == expected[0]
    np.testing.assert_allclose(actual[1], expected[1], rtol=0, atol=tolerance)


class Reports:
    """What an engine reports of folders, which its threads write."""

    def __init__(self):
        self.problems: dict[str, str | None] = {}
        self._has_come = threading.Condition()

    def __call__(self, kind: type, path: str, error: str | None) -> None:
        assert kind is Written
        with self._has_come:
            self.problems[path] = error
            self._has_come.notify_all()

    def until(self, path: str) -> str | None:
        with self._has_come:
            assert self._has_come.wait_for(lambda: path in self.problems, SECONDS)
            return self.problems.pop(path)


REPORTS = Reports()


@contextmanager
def written(path: Path, problem: str | None = None) -> Iterator[None]:
    """Leave the block once an engine has reported that a folder is complete, or what the problem was."""
    yield
    reported = REPORTS.until(str(path))
    if problem is None:
        assert reported is None
    else:
        assert problem in str(reported)


def save_sampler(
    engine: Engine, bank: int | None, adapter: AdapterSpec, path: Path | None = None, wait: bool = True
) -> None:
    """Save; by default, wait until the folder is complete."""
    with written(path) if path is not None and wait else nullcontext():
        engine.execute(moves.save_sampler(FIRST, bank, adapter, path))


def test_training_lowers_the_loss_and_changes_no_other_slot(engine):
    create(engine, FIRST, FOUR)
    create(engine, OTHER, TWO, seed=9)
    train(engine, OTHER)
    other = forward(engine, OTHER)
    losses = train(engine, FIRST, steps=4)
    assert losses == sorted(losses, reverse=True)
    assert np.array_equal(forward(engine, OTHER), other)


def dealt(parts, shards):
    """Several PackedRows or LossInputs in one, in which each data shard has its rows of all of them."""
    fields = {
        name: np.concatenate(
            [getattr(part, name)[shard : shard + 1] for shard in range(shards) for part in parts]
        )
        for name in parts[0].__struct_fields__
        if getattr(parts[0], name) is not None
    }
    return type(parts[0])(**fields)


def test_a_command_of_several_blocks_is_as_many_commands_of_one(engine):
    shards = engine.setup.fsdp * engine.setup.ep
    create(engine, FIRST, FOUR)
    train(engine, FIRST)  # so that all gradients differ from zero
    parts = [batch(engine, FIRST, seed) for seed in range(3)]
    whole = {name: dealt([part[name] for part in parts], shards) for name in ("rows", "loss")}
    results, gradients = [], []
    for makes in [{**whole, "block": 1}], parts:
        replies = [engine.execute(commands.ForwardBackward(**make))[0] for make in makes]
        replies += [engine.execute(commands.Forward(**make))[0] for make in makes]
        results.append(
            [
                np.concatenate(
                    [np.asarray(reply[name]).reshape(shards, -1, LENGTH).swapaxes(0, 1) for reply in replies]
                )
                for name in ("logprobs", "losses")
            ]
        )
        gradients.append(to_numpy(engine.state.train.grad_sum))
        create(engine, FIRST, FOUR)
        train(engine, FIRST)
    for one, other in zip(*results, strict=True):
        assert one.shape == (6, shards, LENGTH)
        assert np.array_equal(one, other)
    for one, other in zip(*map(jax.tree.leaves, gradients), strict=True):
        assert np.any(one[..., FIRST, :, :])
        assert np.array_equal(one, other)


def test_the_same_seed_and_requests_give_the_same_adapter_in_any_slot(engine):
    for slot in (FIRST, OTHER):
        create(engine, slot, FOUR)
        train(engine, slot)
    assert np.array_equal(forward(engine, FIRST), forward(engine, OTHER))


@pytest.mark.parametrize("adapter", [FOUR, TWO], ids=["rank 4", "rank 2 without attention"])
def test_a_version_that_was_saved_for_sampling_never_changes(engine, tmp_path, adapter):
    create(engine, FIRST, adapter)
    train(engine, FIRST)
    save_sampler(engine, 1, adapter, tmp_path / "saved")
    first = sample(engine, 1)
    train(engine, FIRST)
    trained = forward(engine, FIRST)
    with written(tmp_path / "written"):
        engine.execute(moves.write_sampler(1, tmp_path / "written", adapter))
    assert_same_sample(sample(engine, 1), first)
    _, kept = engine.execute(moves.page_out(1, "first"))
    assert kept["host_bytes"] > 0
    save_sampler(engine, 1, adapter)
    newer = sample(engine, 1)
    assert not np.allclose(newer[1], first[1], atol=1e-3)
    for name in ("saved", "written"):
        engine.execute(moves.load_sampler(2, tmp_path / name, adapter))
        assert_same_sample(sample(engine, 2), first)
    engine.execute(moves.page_in(2, "first", adapter))
    assert_same_sample(sample(engine, 2), first)
    assert_same_sample(sample(engine, 1), newer)
    assert np.array_equal(forward(engine, FIRST), trained)


def test_versions_that_nobody_needs_are_dropped_wherever_they_are(engine):
    create(engine, FIRST, FOUR)
    save_sampler(engine, 1, FOUR)
    for version in ("a", "b"):
        _, kept = engine.execute(moves.page_out(1, version))
    engine.execute(moves.swap_out(FIRST, "model"))
    engine.execute(commands.Drop(places=[Idle("a"), Idle("b")]))
    engine.execute(moves.swap_in(FIRST, "model"))
    assert kept["host_bytes"] > 0
    assert engine.execute(moves.page_out(1, "c"))[1]["host_bytes"] < kept["host_bytes"]
    engine.execute(commands.Drop(places=[Idle("c")]))


def test_the_thread_that_runs_commands_syncs_no_file_of_a_version(engine, tmp_path, monkeypatch):
    synced_by, sync = [], os.fsync
    monkeypatch.setattr(os, "fsync", lambda file: (synced_by.append(threading.get_ident()), sync(file)))
    create(engine, FIRST, FOUR)
    train(engine, FIRST)
    with written(tmp_path / "saved"), written(tmp_path / "written"):
        save_sampler(engine, 1, FOUR, tmp_path / "saved", wait=False)
        engine.execute(moves.write_sampler(1, tmp_path / "written", FOUR))
        for bank, version in ((1, "a"), (2, "b")):
            engine.execute(moves.page_out(bank, version))
        engine.execute(moves.page_in(1, "a", FOUR))
        engine.execute(commands.Drop(places=[Idle("b")]))
    assert synced_by
    assert threading.get_ident() not in synced_by


def test_a_folder_that_cannot_be_written_is_reported_and_leaves_nothing(engine, tmp_path, monkeypatch):
    def full(file):
        raise OSError(errno.ENOSPC, "No space left on device")

    create(engine, FIRST, FOUR)
    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", full)
        with written(tmp_path / "saved", "No space left on device"):
            save_sampler(engine, 1, FOUR, tmp_path / "saved", wait=False)
    assert list(tmp_path.iterdir()) == []
    save_sampler(engine, 1, FOUR, tmp_path / "saved")
    assert (tmp_path / "saved").exists()


def test_a_save_to_disk_alone_leaves_the_bank_as_it_is(engine, tmp_path):
    create(engine, FIRST, FOUR)
    train(engine, FIRST)
    save_sampler(engine, 1, FOUR)
    before = sample(engine, 1)
    train(engine, FIRST)
    save_sampler(engine, None, FOUR, tmp_path / "saved")
    assert_same_sample(sample(engine, 1), before)


def test_rows_of_one_dispatch_use_different_versions(engine):
    for bank in (1, 2):
        create(engine, FIRST, FOUR)
        train(engine, FIRST, steps=2 * bank)
        save_sampler(engine, bank, FOUR)
    alone = {bank: sample(engine, bank) for bank in (0, 1, 2)}
    assert len({tuple(tokens) for tokens, _ in alone.values()}) == 3
    for banks in ([2, 1], [0, 2], [1, 0]):
        for bank, drawn in zip(banks, sample_in_every_shard(engine, banks), strict=True):
            assert_same_sample(drawn, alone[bank], TOLERANCE)


def test_bank_slot_zero_is_the_base_model(engine):
    create(engine, OTHER, FOUR)  # B is zero, so it is still the base model
    engine.execute(moves.save_sampler(OTHER, 2, FOUR))
    assert_same_sample(sample(engine, 0), sample(engine, 2))


def test_training_goes_on_from_a_saved_state_as_if_never_interrupted(engine, tmp_path):
    create(engine, FIRST, FOUR)
    train(engine, FIRST, steps=3)
    engine.execute(moves.save_state(FIRST, tmp_path / "state", FOUR))
    train(engine, FIRST)
    expected = forward(engine, FIRST)
    create(engine, OTHER, TWO, seed=1)
    engine.execute(moves.load_state(OTHER, tmp_path / "state", FOUR, optimizer=True))
    train(engine, OTHER)
    assert np.array_equal(forward(engine, OTHER), expected)


@pytest.mark.parametrize("is_peft", [False, True])
def test_without_its_optimizer_a_saved_state_is_weights_alone(engine, tmp_path, is_peft):
    create(engine, FIRST, FOUR)
    train(engine, FIRST)
    expected = forward(engine, FIRST)
    if is_peft:
        save_sampler(engine, 1, FOUR, tmp_path / "state")
    else:
        engine.execute(moves.save_state(FIRST, tmp_path / "state", FOUR))
    engine.execute(moves.load_state(OTHER, tmp_path / "state", FOUR, optimizer=False))
    assert np.array_equal(forward(engine, OTHER), expected)
    state = to_numpy(engine.state.train)
    assert state.step.tolist() == [2, 0]
    for leaf in jax.tree.leaves((state.mu, state.nu, state.grad_sum)):
        assert not np.any(leaf[..., OTHER, :, :])


def test_checkpoints_load_on_another_mesh_with_another_maximum_rank(engine, model_dir, tmp_path):
    create(engine, FIRST, TWO)
    train(engine, FIRST)
    save_sampler(engine, 1, TWO, tmp_path / "sampler")
    engine.execute(moves.save_state(FIRST, tmp_path / "state", TWO))
    elsewhere = start(model_dir, mesh=(1, 1, 1), max_rank=8)
    elsewhere.execute(moves.load_state(OTHER, tmp_path / "state", TWO, optimizer=True))
    saved, loaded = to_numpy((engine.state.train, elsewhere.state.train))
    assert saved.step[FIRST] == loaded.step[OTHER] == 2
    assert np.array_equal(saved.scale[FIRST], loaded.scale[OTHER])
    for name in ("w", "mu", "nu"):
        assert_padded(getattr(loaded, name), OTHER, getattr(saved, name), FIRST)
    elsewhere.execute(moves.load_sampler(2, tmp_path / "sampler", TWO))
    saved, loaded = to_numpy((engine.state.bank, elsewhere.state.bank))
    assert_padded(loaded.w, 2, saved.w, 1)
    assert np.array_equal(saved.scale[1], loaded.scale[2])


def assert_padded(actual, slot, expected, its_slot):
    """A slot of an adapter holds what another one does, and zeros beyond the ranks of that."""
    for after, before in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        rank = before.shape[-2]
        assert np.array_equal(after[..., slot, :rank, :], before[..., its_slot, :, :])
        assert not np.any(after[..., slot, rank:, :])


def test_folders_of_another_base_model_are_refused_and_nothing_is_changed(engine, kind, tmp_path):
    """One other model is enough: tests/coordinator/checkpoints/test_shapes.py tries several on the check."""
    other = replace(MODELS[kind][0], n_layers=3)
    foreign = start(tiny_model.write(tmp_path / "model", other), (1, 1, 1))
    create(foreign, FIRST, FOUR)
    foreign.execute(moves.save_state(FIRST, tmp_path / "state", FOUR))
    foreign.execute(moves.save_sampler(FIRST, None, FOUR, tmp_path / "adapter"))
    assert REPORTS.until(str(tmp_path / "adapter")) is None
    create(engine, OTHER, FOUR)
    train(engine, OTHER)
    engine.execute(moves.save_sampler(OTHER, 1, FOUR))
    logprobs, drawn = forward(engine, OTHER), sample(engine, 1)
    for load in (
        moves.load_state(OTHER, tmp_path / "state", FOUR, optimizer=True),
        moves.load_state(OTHER, tmp_path / "state", FOUR, optimizer=False),
        moves.load_state(OTHER, tmp_path / "adapter", FOUR, optimizer=False),
        moves.load_sampler(1, tmp_path / "adapter", FOUR),
    ):
        with pytest.raises(ForeignWeights, match=str(tmp_path)):
            engine.execute(load)
    np.testing.assert_array_equal(forward(engine, OTHER), logprobs)
    assert_same_sample(sample(engine, 1), drawn)
