import subprocess
import sys

import psutil
import pytest

from spmd_tx.processes.parent import tied
from tests.support.processes import until_ended

PARENT = f"""
import subprocess, time
from spmd_tx.processes.parent import tied
child = subprocess.Popen(tied([{sys.executable!r}, "-c", "import time; time.sleep(600)"]))
print(child.pid, flush=True)
time.sleep(600)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux ends a process with its parent")
def test_a_command_ends_with_the_process_that_has_started_it():
    with subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True) as parent:
        child = psutil.Process(int(parent.stdout.readline()))
        parent.kill()
    until_ended([child])


def test_a_command_keeps_its_words_and_its_exit_code():
    command = tied([sys.executable, "-c", "import sys; print(sys.argv[1:]); sys.exit(3)", "a b", "--x"])
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (3, "['a b', '--x']\n")
