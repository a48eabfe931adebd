"""How long checkpoints are kept. Times are seconds since the epoch."""

import time

from spmd_tx.coordinator.storage.tables import CheckpointRow
from spmd_tx.errors import InvalidRequest

# One hour to ten years, as the SDK's documentation says
MIN_TTL_SECONDS, MAX_TTL_SECONDS = 3600, 10 * 366 * 24 * 3600


def check_ttl(ttl_seconds: int | None) -> None:
    """Raise InvalidRequest for a time to live that is too short or too long."""
    if ttl_seconds is not None and not MIN_TTL_SECONDS <= ttl_seconds <= MAX_TTL_SECONDS:
        raise InvalidRequest(
            f"ttl_seconds is {ttl_seconds}; it must be between {MIN_TTL_SECONDS} (an hour) and "
            f"{MAX_TTL_SECONDS} (ten years), or null to keep the checkpoint"
        )


def expiry(now: float, ttl_seconds: int | None) -> float | None:
    """Return when a checkpoint of ``now`` expires; None: never."""
    return None if ttl_seconds is None else now + ttl_seconds


def is_expired(row: CheckpointRow) -> bool:
    return row.expires_at is not None and row.expires_at <= time.time()
