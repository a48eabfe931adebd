"""Words for where the time of a run goes, and for what helps."""

from collections.abc import Mapping

from spmd_tx.coordinator.requests.runs.time_shares import Cause, largest_first

IDLE = "The run had no request at the server in this time."
NOTABLE = 0.1  # share of the window from which on a cause is named beside the largest
MOST = 0.5  # share above which a cause took most of the window

DOING: dict[Cause, str] = {
    "device": "computing",
    "queue": "waiting while the devices worked for other runs",
    "compile": "waiting for programs to be compiled",
    "client": "waiting for its client",
    "restart": "waiting for workers to start",
    "server": "in the server's own work",
}

# What the client of a run can do
ADVICE: dict[Cause, str] = {
    "device": "The devices worked for this run. Fewer tokens per step make it faster.",
    "queue": (
        "The devices worked for other runs meanwhile. Owners share them equally, so each of your own runs "
        "goes faster when you have fewer of them at the same time."
    ),
    "compile": (
        "Batches or answers of such lengths came for the first time. Their program is compiled once and "
        "kept; those of lengths that were there before do not wait."
    ),
    "client": (
        "No request of the run was at the server. Send the next one before the result of the last one is "
        "there: call forward_backward and optim_step before you wait for either, and ask for the next "
        "samples while rewards are computed."
    ),
    "restart": "The workers were not running. Nothing is lost: requests go on when they are there again.",
    "server": "Requests were read, batched, stored or restored. Fewer and larger requests help.",
}

# What the operator can do, too
OPERATING: dict[Cause, str] = {
    "device": "More devices do, too.",
    "queue": "More devices help all.",
    "compile": "Keep --warm-up background, and the data directory, where compiled programs are kept.",
    "restart": "The page of the server says why they were not.",
    "server": "So does a faster disk for the data directory.",
}


def advice(cause: Cause, *, is_operator: bool) -> str:
    """Say what helps against a cause, as far as it is in the reader's hands."""
    return " ".join([ADVICE[cause], *([OPERATING[cause]] if is_operator and cause in OPERATING else [])])


def summary(seconds: Mapping[Cause, float]) -> str:
    """Say in a sentence what took most of the time, or the largest part of it."""
    total = sum(seconds.values())
    largest, *rest = largest_first(seconds)
    others = [_part(cause, seconds, total) for cause in rest if seconds[cause] >= NOTABLE * total]
    share = "most" if seconds[largest] > MOST * total else "the largest part"
    first = f"The run spent {share} of this time {_part(largest, seconds, total)}"
    return f"{', then '.join([first, *others])}."


def _part(cause: Cause, seconds: Mapping[Cause, float], total: float) -> str:
    return f"{DOING[cause]} ({100 * seconds[cause] / total:.0f} %)"
