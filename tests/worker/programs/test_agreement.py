"""Processes take a program from their stores together, or compile it together, and it is the same program."""

import os
import shutil
import subprocess
import sys
import threading
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest

from spmd_tx.errors import MeshError
from spmd_tx.protocol.commands import AWAITED
from spmd_tx.protocol.programs import ProgramShape
from spmd_tx.sharding.mesh import make_mesh
from spmd_tx.worker.programs.agreement import Agreement
from spmd_tx.worker.programs.call import Call
from spmd_tx.worker.programs.compiled import CompileOrder, Programs
from tests.support.ports import free_port

ROOT = Path(__file__).parents[3]
SECONDS = 200


def run_both(folders):
    """What the two processes have printed."""
    port = str(free_port())
    command = [sys.executable, "-m", "tests.worker.programs.agreeing_process"]
    processes = [
        subprocess.Popen(
            [*command, str(number), port, str(folder)],
            cwd=ROOT,
            env=os.environ | {"JAX_PLATFORMS": "cpu"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for number, folder in enumerate(folders)
    ]
    try:
        ended = [process.communicate(timeout=SECONDS) for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0, 0], ended[0][1] + ended[1][1]
    return [output.splitlines()[-1].split() for output, _ in ended]  # Gloo prints before it


@pytest.mark.slow
@pytest.mark.timeout(4 * SECONDS)
def test_if_one_process_has_lost_a_program_all_compile_it_again(tmp_path):
    """They may have to meet while they compile."""
    folders = [tmp_path / "first", tmp_path / "second"]
    compiled, stored = (["None", "1.0", source] for source in ("compiler", "store"))
    assert run_both(folders) == [compiled] * 2
    assert run_both(folders) == [stored] * 2
    shutil.rmtree(folders[1])
    assert run_both(folders) == [compiled] * 2
    shutil.rmtree(folders[0])
    assert run_both(folders) == [compiled] * 2


class Others:
    """Answers as two processes would: this one, and one with answers of its own."""

    def __init__(self, *answers):
        self.answers, self.questions = list(answers), []

    def __call__(self, question, answer):
        self.questions.append(question)
        other = self.answers.pop(0)
        return [answer, answer if other is None else other]


def test_a_program_that_not_all_have_is_had_by_nobody():
    others = Others("yes", "no", "yes", "no")
    agreement = Agreement(others)
    asked = [agreement.all_have("decode", mine) for mine in (True, True, False, False)]
    assert asked == [True, False, False, False]
    assert len(set(others.questions)) == 4, "no question is asked twice"


def test_a_worker_compiles_nothing_before_the_others_have_the_same_program():
    compiled, failed = [], []
    lowered = SimpleNamespace(as_text=lambda: "add", compile=lambda: compiled.append("add") or (lambda: 1))
    step = SimpleNamespace(lower=lambda *arguments: lowered)
    calls = [Call(name, (1,), step, ()) for name in ("same", "different")]
    ended = threading.Semaphore(0)
    programs = Programs(
        lambda what: None, lambda number, seconds, error: failed.append(error) or ended.release()
    )
    programs.use(None, None, Agreement(Others("no", None, "no", "another")))
    mesh = make_mesh(1, 1, 1)
    for number, call in enumerate(calls):
        programs.order(
            CompileOrder(number, ProgramShape(step="forward"), partial(list, [call])), mesh, lane=AWAITED
        )
        assert ended.acquire(timeout=30)
    programs.stop()
    assert compiled == ["add"]
    assert failed[0] is None
    assert "different programs for different" in failed[1]


def test_processes_that_would_compile_different_programs_do_not_begin():
    agreement = Agreement(Others(None, "another"))
    agreement.check_same("decode\n8x64", "add")
    with pytest.raises(MeshError, match="different programs for decode"):
        agreement.check_same("decode\n8x64", "multiply")
