"""Says in a word and a sentence how a run is. Pure."""

from typing import NamedTuple

import msgspec

from spmd_tx.coordinator.wire.console.runs import RunHealth, RunState

UNHEARD_SECONDS = 12.0  # after which a client counts as silent: one sends a heartbeat every 10 s
IDLE_SECONDS = 5.0  # for which a run without requests counts as running: clients compute between them
ENDINGS: dict[str, RunState] = {"success": "finished", "errored": "errored", "interrupted": "interrupted"}


class OpenRun(NamedTuple):
    """Holds what is known of a run whose session is open. Times are seconds."""

    unheard: float  # since its client's last heartbeat
    idle: float  # since a request of it has ended, or since it was created
    workers: str | None  # what its workers do instead of running commands
    is_waiting: bool  # whether it has requests, and none of them was sent to the workers
    has_requests: bool  # that are unfinished
    reason: str | None  # why the oldest of them waits
    failed: int  # requests of the last minutes


class EndedRun(NamedTuple):
    """Holds how the session of a run has ended."""

    finish_reason: str | None  # what its client said; None: nothing
    finish_detail: str | None
    because: str | None


def of_open(run: OpenRun) -> RunHealth:
    """Say how a run is whose session is open."""
    if run.unheard >= UNHEARD_SECONDS:
        return RunHealth("silent", f"no heartbeat for {run.unheard:.0f} s", run.failed)
    if not run.has_requests:
        if run.idle < IDLE_SECONDS:
            return RunHealth("running", None, run.failed)
        return RunHealth("waiting", f"its client has asked for nothing for {run.idle:.0f} s", run.failed)
    if run.workers is not None:
        return RunHealth("waiting", f"its workers do not run commands: {run.workers}", run.failed)
    if run.is_waiting and run.reason is not None:
        return RunHealth("waiting", run.reason, run.failed)
    return RunHealth("running", None, run.failed)


def of_ended(run: EndedRun) -> RunHealth:
    """Say how a run is whose session has ended. One that its client did not end was interrupted."""
    state = ENDINGS.get(run.finish_reason or "", "interrupted")
    return RunHealth(state, run.finish_detail or (None if run.finish_reason else run.because), 0)


def without_loss(health: RunHealth) -> RunHealth:
    """Say how a run is whose client has gone without a word, but has saved all that it trained."""
    return msgspec.structs.replace(health, state="left", reason=f"{health.reason}, all steps are saved")
