"""What to settle before JAX opens accelerators: kernels that are correct; for GPUs XLA's flags, and memory.

Everything is tried in a child process. What fails there is not used, and a line in the log says why.
"""

import os
from collections.abc import Callable, Sequence
from functools import partial
from importlib import metadata, util
from pathlib import Path

import jax
import msgspec

from spmd_tx.models.attention import packed_rows
from spmd_tx.models.attention.paged import attention as paged
from spmd_tx.models.config import model_of
from spmd_tx.models.declared.channels import Mixture
from spmd_tx.models.declared.delta_rule import DeltaRule
from spmd_tx.models.declared.mixers import Softmax
from spmd_tx.models.declared.model import Model
from spmd_tx.models.vision import attention as vision
from spmd_tx.protocol.kernels import Kernels, Platform, products_of
from spmd_tx.protocol.setup import Setup
from spmd_tx.worker.decode_ways import PLAIN, ways_for
from spmd_tx.worker.kernel_choices import settle
from spmd_tx.worker.self_tests.attention import AttentionSizes
from spmd_tx.worker.self_tests.decode import DecodeSizes
from spmd_tx.worker.self_tests.images import ImageSizes
from spmd_tx.worker.self_tests.process import AnySizes, run_self_test
from spmd_tx.worker.self_tests.products import ExpertSizes
from spmd_tx.worker.xla_flags import MEMORY_FRACTION, joined_flags, wanted_flags

# A self-test opens one chip alone; otherwise it would wait for the other hosts of a slice.
ONE_CHIP = {"TPU_CHIPS_PER_PROCESS_BOUNDS": "1,1,1", "TPU_PROCESS_BOUNDS": "1,1,1"}


def prepare_accelerator(
    setup: Setup, device_ids: Sequence[int] | None, progress: Callable[[str], None]
) -> Setup:
    """Set this process's environment, and put into the setup which kernels its first device may use.

    Only GPUs need anything set. On CPUs there is nothing to choose.
    """
    is_gpu = has_nvidia_gpu()
    if not is_gpu and not has_tpu():
        return msgspec.structs.replace(setup, kernels=Kernels())
    model = model_of(setup)
    first = device_ids[0] if device_ids else 0
    folder = setup.kernel_choices or setup.compilation_cache
    if is_gpu:
        os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", MEMORY_FRACTION)
        progress("trying flags and attention on the GPU")
        flags, sizes, environment = wanted_flags(setup), sizes_of(setup, model, "gpu", first), {}
    else:
        progress("trying attention on the TPU")
        flags, sizes = list[str](), sizes_of(setup, model, "tpu", 0)
        environment = ONE_CHIP | {"TPU_VISIBLE_CHIPS": str(first)}
    try_one = partial(run_self_test, setup.compilation_cache, environment=environment)
    platform: Platform = "gpu" if is_gpu else "tpu"
    choice = settle(folder, flags, sizes, try_one)
    kernels = Kernels(platform, choice.implementation)

    def choose(task: str, message: str, of_task: AnySizes) -> None:
        nonlocal kernels
        progress(message)
        fastest = settle(folder, choice.flags, of_task, try_one).implementation
        kernels = msgspec.structs.replace(kernels, **{task: fastest})

    choose("pages", "trying attention to pages", page_sizes_of(setup, model, platform, sizes))
    choose(
        "products",
        "trying kernels of products and sums",
        expert_sizes_of(setup, model, platform, sizes.device),
    )
    if of_images := image_sizes_of(setup, model, platform, sizes.device):
        choose("images", "trying attention of images", of_images)
    if is_gpu:
        ways = decode_sizes_of(setup, model, device_ids, kernels.pages)
        if ways.implementations != [PLAIN]:
            choose("decode", "trying ways to run a decode", ways)
        os.environ["XLA_FLAGS"] = joined_flags(choice.flags)
    return msgspec.structs.replace(setup, kernels=kernels)


def keep_float32(dtype: str, platform: str) -> None:
    """Have products of float32 numbers computed in float32 if that is the dtype that was asked for.

    GPUs would round their operands to TF32, and TPUs to bfloat16. Must be called before anything is traced.
    """
    if dtype == "float32" and platform != "cpu":
        jax.config.update("jax_default_matmul_precision", "highest")


def has_nvidia_gpu() -> bool:
    """Say whether JAX would use one, without asking JAX, which would read the flags too early."""
    platforms = jax.config.values["jax_platforms"] or ""
    is_wanted = not platforms or any(name in platforms for name in ("cuda", "gpu"))
    has_plugin = any("cuda" in plugin.name for plugin in metadata.entry_points(group="jax_plugins"))
    return is_wanted and has_plugin and any(Path("/dev").glob("nvidia[0-9]*"))


def has_tpu() -> bool:
    """Say whether JAX would use one, without asking JAX, which would keep it open."""
    platforms = jax.config.values["jax_platforms"] or ""
    chips = [*Path("/dev").glob("accel[0-9]*"), *Path("/dev/vfio").glob("[0-9]*")]
    is_wanted = not platforms or "tpu" in platforms
    return is_wanted and bool(chips) and util.find_spec("libtpu") is not None


def sizes_of(setup: Setup, model: Model, platform: Platform, device: int) -> AttentionSizes:
    """Return the sizes of attention on one device."""
    mixers = [place.layer.mixer for place in model.places if isinstance(place.layer.mixer, Softmax)]
    return AttentionSizes(
        implementations=packed_rows.candidates(platform, model.head_dim, setup.dtype != "float32"),
        heads=model.n_heads // setup.tp,
        kv_heads=max(1, model.n_kv_heads // setup.tp),
        head_dim=model.head_dim,
        device=device,
        windows=tuple(sorted({mixer.window for mixer in mixers})) or (0,),
        has_sinks=any(mixer.sinks for mixer in mixers),
    )


def page_sizes_of(setup: Setup, model: Model, platform: Platform, sizes: AttentionSizes) -> AttentionSizes:
    """Return the sizes of attention to pages on one device, from those of attention to rows."""
    is_bfloat16 = setup.dtype != "float32"
    return msgspec.structs.replace(
        sizes,
        implementations=paged.candidates(platform, model.head_dim, setup.page_size, is_bfloat16),
        page_size=setup.page_size,
        keeps_values=model.keeps_values,
    )


def expert_sizes_of(setup: Setup, model: Model, platform: Platform, device: int) -> ExpertSizes:
    """Return the sizes of a mixture's experts on one device, or else of two layers."""
    channels = (place.layer.channel for place in model.places)
    mixture = next((channel for channel in channels if isinstance(channel, Mixture)), None)
    packed = [each.kept for each in model.packed if each.experts]
    linear = model.stateful
    return ExpertSizes(
        products_of(platform),
        experts=2 if mixture is None else mixture.experts // setup.ep,
        width=model.d_model,
        inner=(model.d_ff if mixture is None else mixture.width) // setup.tp,
        dtype="float32" if setup.dtype == "float32" else "bfloat16",
        device=device,
        encoding=type(packed[0]).__name__ if packed else "",
        group=packed[0].group if packed else 0,
        memory=(linear.k_width, linear.v_width) if isinstance(linear, DeltaRule) else (0, 0),
        is_mixture=mixture is not None,
    )


def image_sizes_of(setup: Setup, model: Model, platform: Platform, device: int) -> ImageSizes | None:
    """Return the sizes of the tower's attention; None: there is no tower, or nothing to choose from."""
    tower = model.tower
    sees = tower is not None and setup.image_tokens != 0
    names = vision.candidates(platform, sees, setup.dtype != "float32")
    if tower is None or len(names) == 1:
        return None
    return ImageSizes(names, tower.heads, tower.head_width, device)


def decode_sizes_of(setup: Setup, model: Model, device_ids: Sequence[int] | None, pages: str) -> DecodeSizes:
    """Return the ways to run a decode that this process could use, and the sizes with which to try them."""
    is_float32 = setup.dtype == "float32"
    return DecodeSizes(
        implementations=ways_for(setup.tp, setup.num_processes),
        devices=[*(device_ids or range(setup.fsdp * setup.ep * setup.tp))],
        tp=setup.tp,
        d_model=model.d_model,
        d_ff=model.d_ff,
        heads=model.n_heads,
        kv_heads=model.n_kv_heads,
        head_dim=model.head_dim,
        page_size=setup.page_size,
        paged_attention="reference" if is_float32 else pages,
        dtype="float32" if is_float32 else "bfloat16",
    )
