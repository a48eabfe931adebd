"""Compares float32 on the accelerator here with float32 on CPUs: python -m tools.bench.float32

Trains and samples with tiny models, with the kernels that a worker with --dtype float32 would use, and with
the same programs on CPUs. Prints the results that are off by most, in parts of their largest number. The exit
code is 1 if that is more than 1e-4, or if other tokens were drawn.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

MOST = 1e-4  # what docs/architecture.md promises of log-probabilities
SHOWN = 5
KINDS = "dense", "mixture", "grouped"  # of tests/support/tiny_engine.py
# What keep_float32 sets in a worker (worker/accelerator.py).
PRECISE = {"JAX_DEFAULT_MATMUL_PRECISION": "highest"}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--kinds", nargs="+", default=KINDS, choices=KINDS)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        here = results(Path(folder) / "here.npz", options.kinds, PRECISE)
        on_cpus = results(Path(folder) / "cpus.npz", options.kinds, {"JAX_PLATFORMS": "cpu"})
    found = sorted(errors(here, on_cpus), key=lambda each: -each[1])
    too_much = [each for each in found if each[1] > MOST]
    for name, error in too_much or found[:SHOWN]:
        print(f"{name}: {error:.1e}")
    print(f"{len(too_much)} of {len(found)} results are off by more than {MOST:.0e}")
    return int(bool(too_much))


def results(file: Path, kinds: Sequence[str], environment: Mapping[str, str]) -> dict[str, np.ndarray]:
    """Return what a process computes on one device."""
    command = [sys.executable, "-m", "tests.worker.mesh_program", "0", "1", "0", "1", str(file)]
    subprocess.run([*command, *(f"{kind}:1,1,1" for kind in kinds)], env=os.environ | environment, check=True)
    return dict(np.load(file))


def errors(here: Mapping[str, np.ndarray], on_cpus: Mapping[str, np.ndarray]) -> Iterator[tuple[str, float]]:
    """Yield the largest error of each array; of whole numbers, the part that differs."""
    for name, wanted in on_cpus.items():
        if wanted.dtype.kind in "iu":
            yield name, float(np.mean(here[name] != wanted))
        else:
            yield name, float(np.abs(here[name] - wanted).max() / max(np.abs(wanted).max(), 1e-30))


if __name__ == "__main__":
    sys.exit(main())
