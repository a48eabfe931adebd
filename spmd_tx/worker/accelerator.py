"""Settings to choose before JAX opens accelerators: kernels that are correct; for GPUs XLA flags, memory.

Everything is tried in a child process, because an unknown flag ends a process, and a kernel may do so, too.
What fails there is not used, and a line in the log says why.
"""

import hashlib
import logging
import os
import re
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from importlib import metadata, util
from pathlib import Path
from types import MappingProxyType
from typing import Any

import jax
import msgspec
import numpy as np
from jax.experimental import multihost_utils

from spmd_tx.models.attention import packed_rows as attention
from spmd_tx.models.attention.paged import attention as paged
from spmd_tx.models.config import read_model_config
from spmd_tx.models.declared.channels import Mixture
from spmd_tx.models.declared.delta_rule import DeltaRule
from spmd_tx.models.declared.mixers import Softmax
from spmd_tx.models.declared.model import Model
from spmd_tx.protocol.setup import Setup
from spmd_tx.worker.decode_ways import PLAIN, ways_for
from spmd_tx.worker.self_tests.attention import Sizes, Verdict
from spmd_tx.worker.self_tests.decode import DecodeSizes
from spmd_tx.worker.self_tests.products import ExpertSizes

SELF_TEST_SECONDS = 300.0  # for all implementations together, in case a kernel hangs
MEMORY_FRACTION = "0.92"  # of a device, for JAX's pool; the rest is for CUDA, cuDNN and NCCL
UNKNOWN_FLAG = re.compile(r"Unknown flags? in XLA_FLAGS:(.*)")

# A request that is executed again must give the same bits.
REPRODUCIBLE = ("--xla_gpu_exclude_nondeterministic_ops=true",)
# XLA computes values twice, to save memory, as soon as a program's arguments need 80 % of a device's, which
# those with the key-value cache do by plan. The plan has room for what a program needs beside its arguments.
COMPUTED_ONCE = ("--xla_disable_hlo_passes=rematerialization",)
# Overlap gathers of the next layer's weights and sums of gradients with this layer's arithmetic.
OVERLAPPED = (
    "--xla_gpu_enable_latency_hiding_scheduler=true",
    "--xla_gpu_enable_while_loop_double_buffering=true",
)
AUTOTUNED = "--xla_gpu_per_fusion_autotune_cache_dir"
# A self-test opens one chip alone; otherwise it would wait for the other hosts of a slice.
ONE_CHIP = {"TPU_CHIPS_PER_PROCESS_BOUNDS": "1,1,1", "TPU_PROCESS_BOUNDS": "1,1,1"}

MODULES = {  # that try what the sizes are of
    Sizes: "spmd_tx.worker.self_tests.attention",
    ExpertSizes: "spmd_tx.worker.self_tests.products",
    DecodeSizes: "spmd_tx.worker.self_tests.decode",
}

log = logging.getLogger(__name__)


def prepare_accelerator(
    setup: Setup, device_ids: Sequence[int] | None, progress: Callable[[str], None]
) -> Setup:
    """Set this process's environment, and put into the setup which kernels its first device may use.

    Only GPUs need anything set. On CPUs the reference is used.
    """
    if setup.attention != "auto":
        return setup
    is_gpu = has_nvidia_gpu()
    if not is_gpu and not has_tpu():
        return msgspec.structs.replace(setup, attention="reference", paged_attention="reference")
    model = read_model_config(
        Path(setup.model_dir), setup.expert_lora, setup.expert_weights, setup.base_dtype
    )
    first = device_ids[0] if device_ids else 0
    folder = setup.kernel_choices or setup.compilation_cache
    if is_gpu:
        os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", MEMORY_FRACTION)
        progress("trying flags and attention on the GPU")
        flags, sizes = wanted_flags(setup), sizes_of(setup, model, "gpu", first)
        try_one = partial(run_self_test, setup.compilation_cache)
    else:
        progress("trying attention on the TPU")
        flags, sizes = [], sizes_of(setup, model, "tpu", 0)
        one_chip = ONE_CHIP | {"TPU_VISIBLE_CHIPS": str(first)}
        try_one = partial(run_self_test, setup.compilation_cache, environment=one_chip)
    choice = settle(folder, flags, sizes, try_one)
    progress("trying attention to pages")
    of_page = settle(folder, choice.flags, of_pages(setup, model, sizes, is_gpu=is_gpu), try_one)
    experts = setup.experts
    if experts == "auto":
        progress("trying kernels of products and sums")
        of_experts = expert_sizes_of(setup, model, sizes.device)
        experts = settle_experts(folder, choice.flags, of_experts, try_one)
    setup = msgspec.structs.replace(
        setup, attention=choice.attention, paged_attention=of_page.attention, experts=experts
    )
    if is_gpu:
        way, ways = PLAIN, decode_sizes_of(setup, model, device_ids)
        if ways.implementations != [PLAIN]:
            progress("trying ways to run a decode")
            way = settle(folder, choice.flags, ways, try_one).attention
        setup = msgspec.structs.replace(setup, decode_way=way)
        os.environ["XLA_FLAGS"] = joined_flags(choice.flags)
    return setup


class Choice(msgspec.Struct, frozen=True):
    """Holds the XLA flags and the attention that a worker uses, or how it runs a decode."""

    flags: list[str]
    attention: str  # or another implementation


class Ended(msgspec.Struct, frozen=True):
    """Holds how a self-test ended."""

    code: int | None  # None: it took too long and was stopped
    verdicts: list[Verdict]
    errors: str


RunSelfTest = Callable[[Sequence[str], Any], Ended]  # with sizes of MODULES


def settle(folder: str, flags: Sequence[str], sizes: Sizes | DecodeSizes, run: RunSelfTest) -> Choice:
    """Try everything once for this machine and these versions, and store the choice in the folder.

    A restarted worker must choose the same even if a new test came out differently, because requests that
    it runs again must give the same bits.
    """
    key = msgspec.json.encode([machine(), flags, os.environ.get("XLA_FLAGS", ""), sizes])
    kept = Path(folder) / f"accelerator-{hashlib.sha256(key).hexdigest()[:16]}.json"
    if kept.exists():
        return msgspec.json.decode(kept.read_bytes(), type=Choice)
    known, verdicts = try_out(flags, sizes, run)
    for verdict in verdicts:
        if verdict.problem:
            log.warning("%s %r is not used: %s", sizes.what, verdict.implementation, verdict.problem)
    right = [verdict.implementation for verdict in verdicts if verdict.problem is None]
    if not right:
        return Choice(known, "reference")
    choice = Choice(known, right[0])
    _keep(kept, choice)
    return choice


def settle_experts(folder: str, flags: Sequence[str], sizes: ExpertSizes, run: RunSelfTest) -> str:
    """Return "kernel" if all are right on this machine, else "reference", and store the answer."""
    key = msgspec.json.encode([machine(), flags, os.environ.get("XLA_FLAGS", ""), sizes])
    kept = Path(folder) / f"experts-{hashlib.sha256(key).hexdigest()[:16]}.json"
    if kept.exists():
        return msgspec.json.decode(kept.read_bytes(), type=str)
    ended = run(flags, sizes)
    problem = ended.verdicts[0].problem if ended.verdicts else _end(ended)
    if problem is not None:
        log.warning("kernels of products and sums are not used: %s", problem)
    answer = "kernel" if problem is None else "reference"
    _keep(kept, answer)
    return answer


def _keep(path: Path, answer: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(f".{os.getpid()}")  # other workers of this host may write the same
    unfinished.write_bytes(msgspec.json.encode(answer))
    unfinished.replace(path)


def identity_of_choices(folder: Path) -> str:
    """Return a name for the choices of kernels that the folder holds; it lasts as long as they do."""
    file = folder / "identity"
    if not file.exists():
        folder.mkdir(parents=True, exist_ok=True)
        unfinished = folder / f"identity.{os.getpid()}"
        unfinished.write_text(os.urandom(4).hex())
        with suppress(FileExistsError):  # another process of this host was first
            os.link(unfinished, file)
        unfinished.unlink()
    return file.read_text()


def machine() -> list[str]:
    """List versions, driver, GPUs and the kind of TPUs, without opening them."""
    driver = Path("/proc/driver/nvidia")
    files = [driver / "version", *sorted(driver.glob("gpus/*/information"))]
    lines = [line for file in files if file.exists() for line in file.read_text().splitlines()]
    told = [line for line in lines if line.startswith(("NVRM", "Model"))]
    told.append(os.environ.get("TPU_ACCELERATOR_TYPE", ""))
    names = ("jax", "nvidia", "libtpu")
    libraries = [found for found in metadata.distributions() if found.name.startswith(names)]
    return [*told, *sorted(f"{found.name} {found.version}" for found in libraries)]


def keep_float32(dtype: str, platform: str) -> None:
    """Have products of float32 numbers computed in float32 if that is the dtype that was asked for.

    GPUs would round their operands to TF32, and TPUs to bfloat16. Must be called before anything is traced.
    """
    if dtype == "float32" and platform != "cpu":
        jax.config.update("jax_default_matmul_precision", "highest")


def agreed_attention(chosen: str, names: Sequence[str] = tuple(attention.IMPLEMENTATIONS)) -> str:
    """Agree on the slowest of all processes' choices: their programs must be the same.

    ``names`` has the fastest first; a choice that is not among them counts as the reference.
    """
    if chosen not in names or jax.process_count() == 1:
        return chosen if chosen in names else "reference"
    mine = np.int32(names.index(chosen))
    return names[int(multihost_utils.process_allgather(mine).max())]


def agreed_experts(chosen: str) -> str:
    """Agree on the reference if any process needs it."""
    refuses = chosen == "reference"
    if jax.process_count() > 1:
        refuses = bool(multihost_utils.process_allgather(np.int32(refuses)).max())
    return "reference" if refuses else chosen


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


def wanted_flags(setup: Setup) -> list[str]:
    """List our flags for XLA, except those that the user sets."""
    has_collectives = setup.fsdp * setup.ep * setup.tp > 1
    flags = [*REPRODUCIBLE, *COMPUTED_ONCE, *(OVERLAPPED if has_collectives else ())]
    if setup.kernel_choices and not any(map(str.isspace, setup.kernel_choices)):  # spaces separate flags
        # The fastest kernel can be another one next time, and then a request that is executed again would
        # have other bits. So the choices are kept, and not in the cache, which is limited and may be emptied.
        flags.append(f"{AUTOTUNED}={Path(setup.kernel_choices) / 'autotuned'}")
    users = os.environ.get("XLA_FLAGS", "")
    return [flag for flag in flags if flag.split("=")[0] not in users]


def joined_flags(flags: Sequence[str]) -> str:
    """Join our flags and the user's, which come last and so win."""
    return " ".join([*flags, *os.environ.get("XLA_FLAGS", "").split()])


def sizes_of(setup: Setup, model: Model, platform: str, device: int) -> Sizes:
    """Return the sizes of attention on one device."""
    mixers = [place.layer.mixer for place in model.places if isinstance(place.layer.mixer, Softmax)]
    return Sizes(
        implementations=attention.candidates(platform, model.head_dim, setup.dtype != "float32"),
        heads=model.n_heads // setup.tp,
        kv_heads=max(1, model.n_kv_heads // setup.tp),
        head_dim=model.head_dim,
        device=device,
        windows=tuple(sorted({mixer.window for mixer in mixers})) or (0,),
        has_sinks=any(mixer.sinks for mixer in mixers),
    )


def of_pages(setup: Setup, model: Model, sizes: Sizes, *, is_gpu: bool) -> Sizes:
    """Return the sizes of attention to pages on one device, from those of attention to rows."""
    names = paged.candidates(
        "gpu" if is_gpu else "tpu", model.head_dim, setup.page_size, setup.dtype != "float32"
    )
    return msgspec.structs.replace(
        sizes,
        implementations=names,
        page_size=setup.page_size,
        keeps_values=model.keeps_values,
    )


def expert_sizes_of(setup: Setup, model: Model, device: int) -> ExpertSizes:
    """Return the sizes of a mixture's experts on one device, or else of two layers."""
    channels = (place.layer.channel for place in model.places)
    mixture = next((channel for channel in channels if isinstance(channel, Mixture)), None)
    packed = [each.kept for each in model.packed if each.experts]
    linear = model.stateful
    return ExpertSizes(
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


def decode_sizes_of(setup: Setup, model: Model, device_ids: Sequence[int] | None) -> DecodeSizes:
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
        paged_attention="reference" if is_float32 else setup.paged_attention,
        dtype="float32" if is_float32 else "bfloat16",
    )


def try_out(
    flags: Sequence[str], sizes: Sizes | DecodeSizes, run: RunSelfTest
) -> tuple[list[str], list[Verdict]]:
    """Return the flags that XLA knows, and verdicts on the implementations up to the first correct one.

    If even the reference fails, the flags are to blame, and none is returned.
    """
    flags, waiting, verdicts = list(flags), list(sizes.implementations), []
    while waiting:
        ended = run(flags, msgspec.structs.replace(sizes, implementations=waiting))
        if unknown := [flag for flag in flags if flag.split("=")[0] in unknown_flags(ended.errors)]:
            log.warning("XLA does not know %s", " ".join(unknown))
            flags = [flag for flag in flags if flag not in unknown]
            continue
        found = {verdict.implementation: verdict for verdict in ended.verdicts}
        for name in list(waiting):
            verdict = found.get(name) or Verdict(name, _end(ended))
            verdicts.append(verdict)
            waiting.remove(name)
            if verdict.problem is None:
                return flags, verdicts
            if name not in found:
                break  # it ended the process, so the others have not been tried
    if flags:
        log.warning("no attention is right with the XLA flags %s, so they are not set", " ".join(flags))
    return [], verdicts


def unknown_flags(errors: str) -> set[str]:
    """Return the flags that XLA rejected when it ended the process."""
    return {flag.split("=")[0] for text in UNKNOWN_FLAG.findall(errors) for flag in text.split()}


def run_self_test(
    compilation_cache: str,
    flags: Sequence[str],
    sizes: Sizes | ExpertSizes | DecodeSizes,
    *,
    environment: Mapping[str, str] = MappingProxyType({}),
) -> Ended:
    """Run the self-test for these sizes in a child process, with these flags."""
    environment = os.environ | {
        **environment,
        "JAX_COMPILATION_CACHE_DIR": compilation_cache,  # so that the next start is faster
        "XLA_FLAGS": joined_flags(flags),
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",  # other workers' tests may run on the same host
    }
    command = [sys.executable, "-m", MODULES[type(sizes)], msgspec.json.encode(sizes).decode()]
    try:
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=SELF_TEST_SECONDS, check=False
        )
    except subprocess.TimeoutExpired as late:
        return Ended(None, _verdicts(late.stdout or b""), "")
    return Ended(done.returncode, _verdicts(done.stdout.encode()), done.stderr)


def _verdicts(output: bytes) -> list[Verdict]:
    lines = [line for line in output.splitlines() if line.startswith(b"{") and line.endswith(b"}")]
    return [msgspec.json.decode(line, type=Verdict) for line in lines]


def _end(ended: Ended) -> str:
    if ended.code is None:
        return f"its self-test took more than {SELF_TEST_SECONDS:.0f} s"
    last = ended.errors.strip().splitlines()[-1:] or ["without a message"]
    return f"its self-test ended with {ended.code}: {last[0][:300]}"
