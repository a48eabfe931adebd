"""Creates, lists, revokes and rotates API keys in the database. A running server's view is in keyring.py."""

import re
import secrets
import time
from collections.abc import Sequence
from dataclasses import asdict
from hashlib import sha256
from typing import NamedTuple

from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession

from spmd_tx.coordinator.storage.tables import ApiKeyRow, Role
from spmd_tx.coordinator.tenancy import audit
from spmd_tx.coordinator.tenancy.callers import Caller, KeyLimits
from spmd_tx.errors import StartError
from spmd_tx.options import MANY, check_number, flag

PREFIX = "tml-"  # the SDK refuses to send anything else
SECRET_BYTES = 24
ID_BYTES = 4
DAY, HOUR = 24 * 3600.0, 3600.0  # seconds
MOST_DAYS = 36_500
OWNER = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@+-]{0,99}")


class NewKeyOptions(NamedTuple):
    """Describes a key to be made."""

    owner: str
    role: Role = "user"
    lifetime: float | None = None  # seconds; None: until it is revoked
    limits: KeyLimits = KeyLimits()


class NewKey(NamedTuple):
    """Holds a new key's row, and the only copy of its token."""

    token: str
    row: ApiKeyRow


def digest(token: str) -> str:
    # A fast hash without salt is right: nobody guesses 192 random bits, and every request costs a hash.
    return sha256(token.encode()).hexdigest()


def problem(row: ApiKeyRow, now: float) -> str | None:
    """Why a key is not valid any more, if so."""
    if row.revoked_at is not None and row.revoked_at <= now:
        return "was revoked"
    if row.expires_at is not None and row.expires_at <= now:
        return "has expired"
    return None


async def listed(db: AsyncSession) -> Sequence[ApiKeyRow]:
    """All keys, valid or not, in the order of their creation."""
    return (await db.scalars(select(ApiKeyRow).order_by(ApiKeyRow.created_at, ApiKeyRow.id))).all()


async def create(db: AsyncSession, options: NewKeyOptions) -> NewKey:
    """Make a key. Raises StartError for options that make no sense."""
    _check(options)
    token, now = PREFIX + secrets.token_hex(SECRET_BYTES), time.time()
    row = ApiKeyRow(
        id=secrets.token_hex(ID_BYTES),
        hash=digest(token),
        owner=options.owner,
        role=options.role,
        created_at=now,
        expires_at=None if options.lifetime is None else now + options.lifetime,
        **asdict(options.limits),
    )
    db.add(row)
    _note(db, "key_created", row, role=options.role)
    return NewKey(token, row)


async def revoke(db: AsyncSession, id: str, caller: Caller = audit.OPERATOR) -> ApiKeyRow:
    """End a key at once. Revoking it again changes nothing."""
    row = await _find(db, id)
    if row.revoked_at is None:
        row.revoked_at = time.time()
        _note(db, "key_revoked", row, caller)
    return row


async def rotate(db: AsyncSession, id: str, overlap: float) -> NewKey:
    """Replace a key by a new one like it. The old key stays valid for ``overlap`` seconds at most.

    ``id`` may be the beginning of one.
    """
    check_number("--overlap-hours", overlap / HOUR, 0, MOST_DAYS * 24)
    old, now = await _find(db, await whole_id(db, id)), time.time()
    reason = problem(old, now)
    if reason is not None:
        raise StartError(
            f"key {old.id} {reason}; create a new one with: spmd-tx keys create --owner {old.owner}"
        )
    lifetime = None if old.expires_at is None else old.expires_at - old.created_at
    limits = KeyLimits(old.adapters, old.queued_requests, old.queued_tokens, old.requests_per_second)
    new = await create(db, NewKeyOptions(old.owner, old.role, lifetime, limits))
    old.expires_at = now + overlap if old.expires_at is None else min(old.expires_at, now + overlap)
    _note(db, "key_rotated", old, replaced_by=new.row.id)
    return new


async def whole_id(db: AsyncSession, beginning: str) -> str:
    """Return the ID of the key that begins so. Raises StartError when there is none, or more than one."""
    begins_so = ApiKeyRow.id.startswith(beginning, autoescape=True)
    matching = (await db.scalars(select(ApiKeyRow.id).where(begins_so).limit(2))).all()
    if not matching or not beginning:
        raise _unknown(beginning)
    if len(matching) > 1:
        raise StartError(f"{' and '.join(matching)} begin with {beginning!r}; give more of the ID")
    return matching[0]


def _note(
    db: AsyncSession, event: str, row: ApiKeyRow, caller: Caller = audit.OPERATOR, **details: str
) -> None:
    audit.add(db, audit.AuditEvent(event, caller, row.owner, {"key": row.id, **details}))


async def _find(db: AsyncSession, id: str) -> ApiKeyRow:
    row = await db.get(ApiKeyRow, id)
    if row is None:
        raise _unknown(id)
    return row


def _unknown(id: str) -> StartError:
    return StartError(f"there is no key {id!r}; spmd-tx keys list shows the IDs of all")


def _check(options: NewKeyOptions) -> None:
    if not OWNER.fullmatch(options.owner):
        raise StartError(
            f"--owner is {options.owner!r}; "
            "use up to 100 letters, digits and any of . _ @ + - after the first"
        )
    days = None if options.lifetime is None else options.lifetime / DAY
    amounts = {"--expires-days": (days, MOST_DAYS)} | {
        flag(name): (amount, MANY) for name, amount in asdict(options.limits).items()
    }
    for option, (amount, most) in amounts.items():
        if amount is not None and not 0 < amount <= most:
            raise StartError(
                f"{option} is {amount:g}; it must be more than 0 and at most {most}, or be left out"
            )
