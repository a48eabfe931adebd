"""Runs like ``spmd-tx worker``, with a fake worker: agent_with_fake_worker.py OPTIONS, a JSON object."""

import asyncio
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[3]))

from spmd_tx.coordinator.agent import main
from spmd_tx.coordinator.agent.agent import AgentOptions
from spmd_tx.errors import StartError


def run(options):
    options = {"secret": main.shared_secret(None), **options}
    worker = [str(Path(__file__).parents[1] / "mesh" / "fake_worker.py")]
    try:
        sys.exit(asyncio.run(main.run(AgentOptions(**options), worker)))
    except StartError as error:
        print(f"spmd-tx: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    run(json.loads(sys.argv[1]))
