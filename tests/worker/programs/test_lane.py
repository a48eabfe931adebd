import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="a thread has a priority of its own there")

# An ordinary user's process may lower its priority, and not raise it again.
CHILD = """
import os, sys, threading
from spmd_tx.worker.programs.lane import Lane
if os.getuid() == 0:
    os.setuid(65534)
lane = Lane("aside", lambda: int(sys.argv[1]))
lane.put(lambda: print(os.getpriority(os.PRIO_PROCESS, threading.get_native_id())))
assert lane.stop()
"""


@pytest.mark.parametrize("above", [-3, 3])
def test_a_lane_works_in_a_process_of_any_priority(above):
    own = os.getpriority(os.PRIO_PROCESS, 0)
    if own + 5 + above > 19:
        pytest.skip("these tests run with the lowest priority")
    command = ["nice", "-n", "5", sys.executable, "-c", CHILD, str(own + 5 + above)]
    ended = subprocess.run(command, capture_output=True, text=True)
    assert (ended.stdout, ended.stderr) == (f"{own + 5 + max(above, 0)}\n", "")
