"""One process of a mesh: trains and samples with the tiny models on some meshes, and writes what came out.

Arguments: process, processes, port, devices of the process, file to write; then KIND:FSDP,EP,TP or, with base
weights split over fsdp, KIND:FSDP,EP,TP:split.
"""

import sys

import jax
import numpy as np

PROCESS, PROCESSES, PORT, DEVICES = map(int, sys.argv[1:5])

import tests.support.engine_setup  # noqa: E402, F401

jax.config.update("jax_num_cpu_devices", DEVICES)
if PROCESSES > 1:
    jax.distributed.initialize(f"127.0.0.1:{PORT}", num_processes=PROCESSES, process_id=PROCESS)

from tests.support.mesh_results import results  # noqa: E402

everything = {}
for engine in sys.argv[6:]:
    kind, shape, *split_base = engine.split(":")
    fsdp, ep, tp = map(int, shape.split(","))
    for name, array in results((fsdp, ep, tp), kind, bool(split_base)).items():
        everything[f"{engine}/{name}"] = array
if PROCESS == 0:
    np.savez(sys.argv[5], **everything)
