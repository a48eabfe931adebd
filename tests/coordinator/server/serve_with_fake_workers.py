"""Serves like ``spmd-tx serve``, with fake workers: serve_with_fake_workers.py OPTIONS_IN_JSON [WORKER]."""

import json
import resource
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[3]))

from spmd_tx.config import ServerConfig
from spmd_tx.coordinator.mesh import generations
from spmd_tx.coordinator.runtime import event_loop
from spmd_tx.coordinator.server import serve
from spmd_tx.errors import StartError

FAKE_WORKER = str(Path(__file__).parents[1] / "mesh" / "fake_worker.py")


def main(options, worker=FAKE_WORKER):
    generations.FIRST_DELAY = 0.01  # fake workers start in no time
    for name in {"data_dir", "secret_file"} & options.keys():
        options[name] = Path(options[name])
    try:
        sys.exit(event_loop.run(serve.serve(ServerConfig(**options), [worker])))
    except StartError as error:
        print(f"spmd-tx: {error}", file=sys.stderr)
        sys.exit(2)


def with_few_files(options):
    """Serve as ``main`` does, where a process may open no more files than these."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
    main(options)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]), *sys.argv[2:])
