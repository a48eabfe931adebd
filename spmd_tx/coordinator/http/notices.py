"""Notices: sent once in each session, in a header that the SDK writes to the user's log."""

from spmd_tx.coordinator.runtime.byte_lru import ByteLru

HEADER = "x-deprecation-note"  # the only one that the SDK shows
STABLE_REINFORCE = (
    "stable_reinforce is computed by a formula of this server's own, REINFORCE with truncated importance "
    "weights, because the hosted one is not public; results will differ. docs/losses.md defines it"
)
MEMORY_BYTES = 1 << 20  # a session that no longer fits is notified again


class Notices:
    """Remembers which sessions got the notice."""

    def __init__(self) -> None:
        self._notified: ByteLru[bool] = ByteLru(MEMORY_BYTES)

    def of_training(self, session_id: str, loss_fn: str) -> dict[str, str]:
        """Return the headers for the answer to a request that trains with this loss."""
        if loss_fn != "stable_reinforce" or self._notified.get(session_id):
            return {}
        self._notified.put(session_id, True, len(session_id))
        return {HEADER: STABLE_REINFORCE}
