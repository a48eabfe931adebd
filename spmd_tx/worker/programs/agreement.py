"""Decisions that all processes of a mesh take alike, by way of jax.distributed's key-value store.

Unlike a collective this needs no device, so any thread may ask, whatever commands run meanwhile.
"""

import hashlib
import threading
from collections import Counter
from collections.abc import Callable, Sequence

import jax
from jax._src import distributed  # no public function reaches the store
from jax.sharding import Mesh

from spmd_tx.errors import MeshError
from spmd_tx.sharding.mesh import platform

SECONDS = 1800.0  # for the others to ask the same: they may still be compiling what comes before it

Exchange = Callable[[str, str], Sequence[str]]  # question, my answer -> everybody's answers


def must_agree(mesh: Mesh) -> bool:
    """Return whether processes meet while they compile: several on accelerators."""
    return jax.process_count() > 1 and platform(mesh) != "cpu"


def everybodys(question: str, answer: str) -> Sequence[str]:
    """Return the answers of all processes, in their order. Everybody must ask, and nobody the same twice."""
    client = distributed.global_state.client
    if client is None:
        return [answer]
    client.key_value_set(f"spmd_tx/{question}/{jax.process_index()}", answer)
    waiting = int(1000 * SECONDS)
    return [
        client.blocking_key_value_get(f"spmd_tx/{question}/{process}", waiting)
        for process in range(jax.process_count())
    ]


class Agreement:
    """Agrees on where programs come from, and that they are the same. Any thread may call the methods.

    XLA may have the processes that compile a program meet (on GPUs they share the results of autotuning). A
    process that had found the program elsewhere would not come, and the others would wait for it forever.
    """

    def __init__(self, exchange: Exchange = everybodys) -> None:
        self._exchange = exchange
        self._lock = threading.Lock()
        self._asked = Counter[str]()

    def all_have(self, program: str, has_it: bool) -> bool:
        """Return whether every process has a program; ``program`` describes it alike in all of them."""
        return all(answer == "yes" for answer in self._ask("has", program, "yes" if has_it else "no"))

    def check_same(self, program: str, lowered: str) -> None:
        """Compare what the processes are about to compile. Raises MeshError if it differs."""
        answers = self._ask("lowered", program, _digest(lowered))
        if len(set(answers)) > 1:
            name = program.splitlines()[0]
            raise MeshError(
                f"the processes would compile different programs for {name}: {', '.join(answers)}"
            )

    def _ask(self, kind: str, subject: str, answer: str) -> Sequence[str]:
        question = f"{kind}/{_digest(subject)}"
        with self._lock:  # a program whose compilation has failed may be tried again
            self._asked[question] += 1
            count = self._asked[question]
        return self._exchange(f"{question}/{count}", answer)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:32]
