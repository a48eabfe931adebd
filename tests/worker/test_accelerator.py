import os
import shutil
from dataclasses import replace as replace_fields

import msgspec
import numpy as np
import pytest
from msgspec.structs import replace

from spmd_tx.demo import tiny_model
from spmd_tx.models.declared.tower import Tower
from spmd_tx.protocol.kernels import PRODUCTS, Kernels, references
from spmd_tx.protocol.setup import Setup
from spmd_tx.worker import accelerator, kernel_choices, xla_flags
from spmd_tx.worker.accelerator import prepare_accelerator
from spmd_tx.worker.kernel_choices import Choice, agreed, identity_of_choices, try_out
from spmd_tx.worker.self_tests.attention import AttentionSizes
from spmd_tx.worker.self_tests.images import ImageSizes
from spmd_tx.worker.self_tests.process import Ended, run_self_test
from spmd_tx.worker.self_tests.products import ExpertSizes
from spmd_tx.worker.self_tests.verdict import Verdict
from tests.support.model_shapes import TINY, resized

SIZES = AttentionSizes(["triton", "cudnn_masked", "reference"], heads=4, kv_heads=2, head_dim=8)
SETUP = Setup(
    generation=0,
    num_processes=1,
    jax_coordinator="",
    model_dir="/nowhere",
    dtype="auto",
    fsdp=1,
    ep=1,
    tp=2,
    adapter_slots=1,
    idle_adapters="",
    bank_slots=1,
    max_rank=8,
    max_context=64,
    page_size=4,
    kv_cache_tokens=0,
    decode_rows=4,
    decode_steps=4,
    compilation_cache="",
)


FASTEST = Kernels("gpu", "triton", "triton", "mosaic_gpu")
MIXED = Kernels("gpu", "triton", "reference", "reference")
REFERENCE_OF_PAGES = {"cpu": "row_by_row", "gpu": "reference"}


class FakeGpu:
    """Runs self-tests: some flags are unknown to it, and some implementations fail or end the process."""

    def __init__(self, *, unknown=(), wrong=(), fatal=(), bad_flag=None):
        self.unknown, self.wrong, self.fatal, self.bad_flag = unknown, wrong, fatal, bad_flag
        self.runs = []

    def __call__(self, flags, sizes):
        if isinstance(sizes, ExpertSizes):
            wrong = "the product is off by 1" if "product" in self.wrong else None
            kernels = [Verdict(name, wrong) for name in PRODUCTS["gpu"]]
            return Ended(0, [*kernels, Verdict("reference", None)], "")
        self.runs.append((list(flags), sizes.implementations))
        if known := [flag for flag in flags if flag in self.unknown]:
            return Ended(1, [], f"F0101 parse_flags: Unknown flags in XLA_FLAGS: {' '.join(known)}\n")
        verdicts = []
        for name in sizes.implementations:
            if name in self.fatal:
                return Ended(-11, verdicts, "CUDA_ERROR_ILLEGAL_ADDRESS")
            is_wrong = name in self.wrong or self.bad_flag in flags
            verdicts.append(Verdict(name, "output is off by 1" if is_wrong else None))
        return Ended(0, verdicts, "")


def chosen(verdicts):
    return [verdict.implementation for verdict in verdicts if verdict.problem is None][:1]


@pytest.mark.parametrize(
    "gpu, expected",
    [
        (FakeGpu(), ["triton"]),
        (FakeGpu(wrong=["triton"]), ["cudnn_masked"]),
        (FakeGpu(wrong=["triton", "cudnn_masked"]), ["reference"]),
        (FakeGpu(fatal=["triton"]), ["cudnn_masked"]),
        (FakeGpu(fatal=["triton", "cudnn_masked"]), ["reference"]),
        (FakeGpu(fatal=["triton", "cudnn_masked", "reference"]), []),
    ],
)
def test_the_fastest_implementation_that_is_right_is_used(gpu, expected):
    assert chosen(try_out(["--a=1"], SIZES, gpu)[1]) == expected


def test_why_one_is_not_used_is_known():
    _, verdicts = try_out([], SIZES, FakeGpu(fatal=["triton"], wrong=["cudnn_masked"]))
    assert [verdict.problem for verdict in verdicts] == [
        "its self-test ended with -11: CUDA_ERROR_ILLEGAL_ADDRESS",
        "output is off by 1",
        None,
    ]


def test_flags_that_xla_does_not_know_are_left_out():
    gpu = FakeGpu(unknown=["--b=2"])
    flags, verdicts = try_out(["--a=1", "--b=2"], SIZES, gpu)
    assert flags == ["--a=1"]
    assert chosen(verdicts) == ["triton"]
    assert len(gpu.runs) == 2


def test_flags_with_which_nothing_is_right_are_left_out():
    assert try_out(["--a=1", "--b=2"], SIZES, FakeGpu(bad_flag="--b=2"))[0] == []


def test_an_unknown_flag_of_the_user_is_not_looked_for_forever():
    flags, _ = try_out([], SIZES, lambda flags, sizes: Ended(1, [], "Unknown flag in XLA_FLAGS: --theirs=1"))
    assert flags == []


def test_a_real_process_tells_which_flag_it_does_not_know(tmp_path, monkeypatch):
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    known = [*xla_flags.REPRODUCIBLE, *xla_flags.COMPUTED_ONCE, *xla_flags.OVERLAPPED]
    flags = [*known, "--xla_no_such_flag=true"]
    ended = run_self_test(str(tmp_path), flags, msgspec.structs.replace(SIZES, implementations=["triton"]))
    assert xla_flags.unknown_flags(ended.errors) == {"--xla_no_such_flag"}
    assert ended.code


@pytest.mark.slow
def test_a_real_process_without_a_gpu_finds_that_cudnn_is_not_there(tmp_path, monkeypatch):
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    flags = [*xla_flags.REPRODUCIBLE, *xla_flags.COMPUTED_ONCE, *xla_flags.OVERLAPPED]
    ended = run_self_test(str(tmp_path), flags, SIZES)
    problems = {verdict.implementation: verdict.problem for verdict in ended.verdicts}
    assert "cuDNN is not detected" in str(problems.pop("cudnn_masked"))
    # For heads of eight numbers there is no kernel, so that what is tried as one is the reference.
    assert set(problems.values()) == {None}


def test_without_a_gpu_nothing_is_started_or_set(monkeypatch):
    monkeypatch.setattr(accelerator, "has_nvidia_gpu", lambda: False)
    monkeypatch.setattr(accelerator, "run_self_test", None)
    before = dict(os.environ)
    setup = prepare_accelerator(SETUP, None, lambda _: None)
    assert setup.kernels == Kernels()
    assert dict(os.environ) == before


def test_on_a_tpu_one_chip_is_tried_and_no_flag_is_set(monkeypatch, tmp_path):
    monkeypatch.setattr(accelerator, "has_tpu", lambda: True)
    asked = []

    def run(cache, flags, sizes, *, environment):
        chip = environment["TPU_VISIBLE_CHIPS"]
        asked.append((cache, flags, list(sizes.implementations), sizes.device, chip))
        return Ended(0, [Verdict(name, None) for name in sizes.implementations], "")

    monkeypatch.setattr(accelerator, "run_self_test", run)
    before = dict(os.environ)
    model = tiny_model.write(tmp_path / "model")
    setup = msgspec.structs.replace(SETUP, model_dir=str(model), compilation_cache=str(tmp_path / "cache"))
    told = prepare_accelerator(setup, [2], lambda _: None)
    assert told.kernels == Kernels("tpu", "mosaic", "reference", "mosaic")
    # For pages of 4 tokens there is no kernel. Training adds rows by one, also where there are no experts.
    names = ["mosaic", "reference"], ["reference"], ["mosaic", "reference"]
    assert asked == [(str(tmp_path / "cache"), [], each, 0, "2") for each in names]
    assert dict(os.environ) == before


def test_what_was_chosen_is_chosen_again(tmp_path, monkeypatch):
    def settle(gpu, flags=()):
        return kernel_choices.settle(str(tmp_path / "cache"), list(flags), SIZES, gpu)

    disturbed = FakeGpu(fatal=SIZES.implementations)
    assert settle(disturbed) == Choice([], "reference")
    assert settle(FakeGpu(), ["--a=1"]) == settle(disturbed, ["--a=1"]) == Choice(["--a=1"], "triton")
    assert settle(FakeGpu(wrong=["triton"]), ["--b=1"]).implementation == "cudnn_masked", "another question"
    monkeypatch.setattr(kernel_choices, "machine", lambda: ["another GPU"])
    assert settle(FakeGpu(wrong=["triton"]), ["--a=1"]).implementation == "cudnn_masked"
    assert all(file.suffix == ".json" for file in (tmp_path / "cache").iterdir())


def test_a_machine_is_described_without_a_gpu():
    assert all(isinstance(line, str) for line in kernel_choices.machine())


def test_on_a_gpu_the_environment_is_set_and_the_choice_is_told(tmp_path, monkeypatch, caplog):
    model = resized(TINY, vocab_size=256, n_heads=8, n_kv_heads=1)
    gpu = FakeGpu(wrong=["triton", "product", "graphs and one-shot"], unknown=[xla_flags.OVERLAPPED[1]])
    tried = []
    monkeypatch.setattr(accelerator, "has_nvidia_gpu", lambda: True)
    monkeypatch.setattr(accelerator, "model_of", lambda *_: model)
    monkeypatch.setattr(
        accelerator, "run_self_test", lambda _, flags, sizes, **_e: tried.append(sizes) or gpu(flags, sizes)
    )
    monkeypatch.setenv("XLA_FLAGS", "--xla_of_the_user=1")
    monkeypatch.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.5")
    here = msgspec.structs.replace(SETUP, compilation_cache=str(tmp_path))
    setup = prepare_accelerator(here, [3, 4], lambda _: None)
    assert setup.kernels == Kernels("gpu", "cudnn_masked", "reference", "reference", "graphs")
    gpu.wrong = []
    tried.clear()
    here = msgspec.structs.replace(SETUP, compilation_cache=str(tmp_path / "another"))
    setup = prepare_accelerator(here, [3, 4], lambda _: None)
    assert setup.kernels == Kernels("gpu", "triton", "triton", "mosaic_gpu", "graphs and one-shot")
    ours = [*xla_flags.REPRODUCIBLE, *xla_flags.COMPUTED_ONCE, xla_flags.OVERLAPPED[0]]
    assert os.environ["XLA_FLAGS"].split() == [*ours, "--xla_of_the_user=1"]
    assert os.environ["XLA_PYTHON_CLIENT_MEM_FRACTION"] == "0.5"
    attention, *_, pages, products, decodes = tried
    assert (attention.heads, attention.kv_heads, attention.device) == (4, 1, 3)
    assert pages.page_size == 4
    assert (products.width, products.inner, products.device) == (64, 64, 3)
    assert (decodes.devices, decodes.tp, decodes.heads, decodes.paged_attention) == ([3, 4], 2, 8, "triton")
    assert "decode by 'graphs and one-shot' is not used: output is off by 1" in caplog.text
    assert "attention 'triton' is not used: output is off by 1" in caplog.text
    assert "paged attention 'triton' is not used: output is off by 1" in caplog.text
    for name in PRODUCTS["gpu"]:
        assert f"products and sums {name!r} is not used: the product is off by 1" in caplog.text


def test_a_flag_of_the_user_replaces_ours(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--xla_gpu_enable_latency_hiding_scheduler=false")
    others = [*xla_flags.REPRODUCIBLE, *xla_flags.COMPUTED_ONCE, xla_flags.OVERLAPPED[1]]
    assert xla_flags.wanted_flags(SETUP) == others


def test_choices_of_kernels_are_kept_apart_from_the_cache_and_have_a_name(tmp_path, monkeypatch):
    monkeypatch.delenv("XLA_FLAGS", raising=False)
    folder = tmp_path / "kernel_choices"
    here = msgspec.structs.replace(
        SETUP, kernel_choices=str(folder), compilation_cache=str(tmp_path / "cache")
    )
    assert xla_flags.wanted_flags(here)[-1] == f"{xla_flags.AUTOTUNED}={folder}/autotuned"
    spaced = msgspec.structs.replace(here, kernel_choices="/my data/kernel_choices")
    assert xla_flags.wanted_flags(spaced) == xla_flags.wanted_flags(SETUP)
    first = identity_of_choices(folder)
    assert first == identity_of_choices(folder)
    assert [file.name for file in folder.iterdir()] == ["identity"]
    shutil.rmtree(folder)
    assert identity_of_choices(folder) != first, "what was chosen is gone"


def test_the_choice_of_attention_is_kept_with_those_of_kernels(tmp_path, monkeypatch):
    monkeypatch.setattr(accelerator, "has_nvidia_gpu", lambda: True)
    model = resized(TINY, vocab_size=256, n_heads=8, n_kv_heads=1)
    monkeypatch.setattr(accelerator, "model_of", lambda *_: model)
    monkeypatch.setattr(accelerator, "run_self_test", lambda _, flags, sizes, **_e: FakeGpu()(flags, sizes))
    monkeypatch.setenv("XLA_FLAGS", "")
    monkeypatch.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.5")
    folders = {name: str(tmp_path / name) for name in ("kernel_choices", "compilation_cache")}
    prepare_accelerator(msgspec.structs.replace(SETUP, **folders), None, lambda _: None)
    assert [file.suffix for file in (tmp_path / "kernel_choices").iterdir()] == [".json"] * 4
    assert not (tmp_path / "compilation_cache").exists()


def test_attention_of_images_is_tried_where_a_model_sees_in_bfloat16(tmp_path, monkeypatch):
    tower = Tower(depth=2, width=64, inner=128, heads=4, side=8, out=64)
    sees, tried = replace_fields(TINY, tower=tower), []
    monkeypatch.setattr(accelerator, "has_nvidia_gpu", lambda: True)
    monkeypatch.setattr(accelerator, "model_of", lambda *_: sees)
    monkeypatch.setattr(
        accelerator,
        "run_self_test",
        lambda _, flags, sizes, **_e: tried.append(sizes) or FakeGpu()(flags, sizes),
    )
    monkeypatch.setenv("XLA_FLAGS", "")
    monkeypatch.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.5")

    def images_of(**different):
        options = {"image_tokens": None, "compilation_cache": str(tmp_path)} | different
        here = replace(SETUP, **options)
        return prepare_accelerator(here, [3], lambda _: None).kernels.images

    assert images_of() == "cudnn"
    (sizes,) = (each for each in tried if isinstance(each, ImageSizes))
    assert (sizes.heads, sizes.width, sizes.device) == (4, 16, 3)
    assert images_of(image_tokens=0) == images_of(dtype="float32") == "reference"
    assert sum(isinstance(each, ImageSizes) for each in tried) == 1


def test_one_device_has_no_collectives_to_hide():
    alone = msgspec.structs.replace(SETUP, tp=1)
    assert xla_flags.wanted_flags(alone) == [*xla_flags.REPRODUCIBLE, *xla_flags.COMPUTED_ONCE]


@pytest.mark.parametrize("platform", ["gpu", "cpu"])
def test_an_engine_without_a_choice_for_its_platform_uses_the_references(platform):
    assert agreed(FASTEST, platform) == (FASTEST if platform == "gpu" else Kernels())
    assert agreed(Kernels(), platform) == Kernels(platform, pages=REFERENCE_OF_PAGES[platform])


@pytest.mark.parametrize(
    "ours, theirs, expected",
    [
        (FASTEST, replace(FASTEST, rows="cudnn_masked"), replace(FASTEST, rows="cudnn_masked")),
        (references("gpu"), FASTEST, references("gpu")),
        (replace(FASTEST, products="reference"), replace(FASTEST, pages="reference"), MIXED),
    ],
)
def test_processes_that_chose_differently_take_the_slower_of_each_choice(ours, theirs, expected, monkeypatch):
    numbers = []

    def gather(mine):
        numbers.append(mine)
        return np.array(numbers)

    monkeypatch.setattr(kernel_choices.jax, "process_count", lambda: 2)
    monkeypatch.setattr(kernel_choices.multihost_utils, "process_allgather", gather)
    agreed(theirs, "gpu")
    assert agreed(ours, "gpu") == expected
