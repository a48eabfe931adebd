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


def of_ended(finish_reason: str | None, finish_detail: str | None, because: str | None) -> RunHealth:
    """Say how a run is whose session has ended, by what its client said (None: nothing), or why else it has.

    One that its client did not end was interrupted.
    """
    state = ENDINGS.get(finish_reason or "", "interrupted")
    return RunHealth(state, finish_detail or (None if finish_reason else because), 0)


def without_loss(health: RunHealth) -> RunHealth:
    """Say how a run is whose client has gone without a word, but has saved all that it trained."""
    return msgspec.structs.replace(health, state="left", reason=f"{health.reason}, all steps are saved")
