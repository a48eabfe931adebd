"""Words for where the time of a run goes, and for what helps."""

from collections.abc import Mapping

from spmd_tx.coordinator.requests.runs.time_shares import Cause, largest_first

IDLE = "The run had no request at the server in this time."
NOTABLE = 0.1  # share of the window from which on a cause is named beside the largest

DOING: dict[Cause, str] = {
    "device": "computing",
    "queue": "waiting while the devices worked for other runs",
    "compile": "waiting for programs to be compiled",
    "client": "waiting for its client",
    "restart": "waiting for workers to start",
    "server": "in the server's own work",
}

ADVICE: dict[Cause, str] = {
    "device": "The devices worked for this run. Fewer tokens per step, or more devices, make it faster.",
    "queue": (
        "The devices worked for other runs meanwhile; owners share them equally. More devices, or fewer runs "
        "at the same time, help."
    ),
    "compile": (
        "A shape was used for the first time. It is over when the warm-up is; keep --warm-up background and "
        "the data directory, where compiled programs are kept, and use fewer different lengths until then."
    ),
    "client": (
        "No request of the run was at the server. Send the next one before the result of the last one is "
        "there: call forward_backward and optim_step before you wait for either, and ask for the next "
        "samples while rewards are computed."
    ),
    "restart": "The workers were not running. The page of the server tells an admin why.",
    "server": (
        "Requests were read, batched, stored or restored. Fewer and larger requests help, and a faster disk "
        "for the data directory."
    ),
}


def summary(seconds: Mapping[Cause, float]) -> str:
    """Say in a sentence what took most of the time."""
    total = sum(seconds.values())
    largest, *rest = largest_first(seconds)
    others = [_part(cause, seconds, total) for cause in rest if seconds[cause] >= NOTABLE * total]
    first = f"The run spent most of this time {_part(largest, seconds, total)}"
    return f"{', then '.join([first, *others])}."


def _part(cause: Cause, seconds: Mapping[Cause, float], total: float) -> str:
    return f"{DOING[cause]} ({100 * seconds[cause] / total:.0f} %)"
