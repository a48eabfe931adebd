"""One process of two that keep programs in stores of their own, and agree where to take them from.

Arguments: process, port, folder of the store. Prints how many programs came from where.
"""

import sys
from functools import partial
from pathlib import Path
from queue import SimpleQueue

import jax
import jax.numpy as jnp
import numpy as np

PROCESS, PORT, FOLDER = int(sys.argv[1]), sys.argv[2], Path(sys.argv[3])
SECONDS = 100

jax.config.update("jax_num_cpu_devices", 1)
jax.config.update("jax_enable_compilation_cache", False)
jax.distributed.initialize(f"127.0.0.1:{PORT}", num_processes=2, process_id=PROCESS)

from jax import lax  # noqa: E402

from spmd_tx.protocol.commands import AWAITED  # noqa: E402
from spmd_tx.protocol.programs import ProgramShape  # noqa: E402
from spmd_tx.sharding.mesh import DATA, make_mesh  # noqa: E402
from spmd_tx.worker.programs.agreement import Agreement  # noqa: E402
from spmd_tx.worker.programs.call import Call  # noqa: E402
from spmd_tx.worker.programs.compiled import CompileOrder, Programs  # noqa: E402
from spmd_tx.worker.programs.store import ProgramStore  # noqa: E402

mesh = make_mesh(2, 1, 1)


@jax.jit
@partial(jax.shard_map, mesh=mesh, in_specs=jax.P(DATA), out_specs=jax.P())
def add_all(x):
    return lax.psum(jnp.sum(x), DATA)


call = Call("add_all", (2,), add_all, (), rows=(np.arange(2, dtype=np.float32),))
settled = SimpleQueue()
programs = Programs(lambda _: None, lambda number, seconds, error: settled.put(error))
programs.use(ProgramStore(FOLDER, f"process {PROCESS}", mesh), None, Agreement())
programs.order(CompileOrder(1, ProgramShape(step="forward"), partial(list, [call])), mesh, lane=AWAITED)
problem = settled.get(timeout=SECONDS)
total = float(programs.run(call, mesh))
programs.stop()
sources = {count.source for count in programs.state().counts if count.program == call.name}
print(problem, total, *sorted(sources), flush=True)
