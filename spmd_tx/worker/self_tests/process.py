"""Runs self-tests, each in a child process: an unknown flag ends a process, and a kernel may do so, too."""

import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

import msgspec

from spmd_tx.worker.self_tests.attention import AttentionSizes
from spmd_tx.worker.self_tests.decode import DecodeSizes
from spmd_tx.worker.self_tests.images import ImageSizes
from spmd_tx.worker.self_tests.products import ExpertSizes
from spmd_tx.worker.self_tests.verdict import Verdict
from spmd_tx.worker.xla_flags import joined_flags

SELF_TEST_SECONDS = 300.0  # for all implementations together, in case a kernel hangs

AnySizes = AttentionSizes | ExpertSizes | DecodeSizes | ImageSizes


class Ended(msgspec.Struct, frozen=True):
    """Holds how a self-test ended."""

    code: int | None  # None: it took too long and was stopped
    verdicts: list[Verdict]
    errors: str

    @property
    def why(self) -> str:
        """Says why there is no verdict."""
        if self.code is None:
            return f"its self-test took more than {SELF_TEST_SECONDS:.0f} s"
        last = self.errors.strip().splitlines()[-1:] or ["without a message"]
        return f"its self-test ended with {self.code}: {last[0][:300]}"


RunSelfTest = Callable[[Sequence[str], AnySizes], Ended]  # with flags of XLA


def run_self_test(
    compilation_cache: str,
    flags: Sequence[str],
    sizes: AnySizes,
    *,
    environment: Mapping[str, str] = MappingProxyType({}),
) -> Ended:
    """Run the module that declares these sizes, which tries them, in a child process with these flags."""
    environment = os.environ | {
        **environment,
        "JAX_COMPILATION_CACHE_DIR": compilation_cache,  # so that the next start is faster
        "XLA_FLAGS": joined_flags(flags),
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",  # other workers' tests may run on the same host
    }
    command = [sys.executable, "-m", type(sizes).__module__, msgspec.json.encode(sizes).decode()]
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
