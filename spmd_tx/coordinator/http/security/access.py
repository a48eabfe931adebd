"""Access control: what a caller may see and use. What belongs to others is answered like what does not exist.

The owner of a session owns its models, samplers, requests and checkpoints. The rule itself is Caller.sees.
"""

from dataclasses import dataclass, replace
from typing import Self

from spmd_tx.coordinator.bases.bases import Bases
from spmd_tx.coordinator.bases.served_base import ServedBase
from spmd_tx.coordinator.catalog.catalog import Catalog, unknown
from spmd_tx.coordinator.catalog.listings import AccessScope
from spmd_tx.coordinator.checkpoints.catalog import CheckpointCatalog
from spmd_tx.coordinator.checkpoints.files import Manifest
from spmd_tx.coordinator.checkpoints.store import OpenCheckpoint
from spmd_tx.coordinator.requests.queue import RequestQueue
from spmd_tx.coordinator.requests.rows import not_kept
from spmd_tx.coordinator.storage.tables import CheckpointRow, ModelRow, SamplerRow, SessionRow
from spmd_tx.coordinator.tenancy.callers import Caller
from spmd_tx.coordinator.tenancy.keyring import Keyring
from spmd_tx.coordinator.wire import checkpoint_paths
from spmd_tx.coordinator.wire.checkpoint_paths import CheckpointPath
from spmd_tx.errors import Forbidden, InvalidRequest, NotFound, RequestError, Unauthorized


@dataclass(frozen=True)
class Access:
    """Looks things up for one caller. Raises NotFound for what the caller may not see."""

    caller: Caller
    catalog: Catalog
    checkpoints: CheckpointCatalog
    queue: RequestQueue
    lender: Caller | None = None  # whose checkpoints the caller may read, too

    def reading_with(self, token: str | None, keyring: Keyring) -> Self:
        """Return access that may also read what another API key may read. Raises InvalidRequest."""
        if token is None:
            return self
        try:
            return replace(self, lender=keyring.caller(token))
        except Unauthorized as error:
            raise InvalidRequest(f"weights_access_token cannot be used: {error}") from None

    def within(self, scope: AccessScope) -> Self:
        """Return access to all that the caller may see, or only to what the caller owns."""
        return self if scope == "accessible" else replace(self, caller=replace(self.caller, role="user"))

    def check_admin(self, what: str) -> None:
        """Raise Forbidden for what is for admins only, unless the caller is one."""
        if self.caller.role != "admin":
            raise Forbidden(f"{what} for admins, and your API key has the role {self.caller.role}")

    async def session(self, session_id: str) -> SessionRow:
        session = await self.catalog.session(session_id)
        if not self.caller.sees(session.owner):
            raise unknown(SessionRow, session_id)
        return session

    async def open_session(self, session_id: str) -> SessionRow:
        """Return a session that accepts work."""
        await self.session(session_id)
        return await self.catalog.open_session(session_id)

    async def model(self, model_id: str) -> ModelRow:
        model = await self.catalog.model(model_id)
        await self._check(model.session_id, unknown(ModelRow, model_id))
        return model

    async def sampler(self, sampler_id: str) -> SamplerRow:
        sampler = await self.catalog.sampler(sampler_id)
        await self._check(sampler.session_id, unknown(SamplerRow, sampler_id))
        return sampler

    async def has_request(self, request_id: str, timeout: float) -> bool:
        """Return whether a request is the caller's; False when that takes more than ``timeout`` seconds."""
        session_id = await self.queue.session_of(request_id, timeout)
        if session_id is not None:
            await self._check(session_id, not_kept(request_id))
        return session_id is not None

    async def checkpoint(self, path: CheckpointPath) -> CheckpointRow:
        """Return a checkpoint that the caller may change."""
        return await self.checkpoints.find(path, lambda row: self.caller.sees(row.owner))

    async def check_meant(self, path: CheckpointPath) -> None:
        """Raise InvalidRequest if a client that quotes no names may mean another checkpoint by this path."""
        await self.checkpoints.check_meant(path, self._may_read)

    async def describe_checkpoint(self, path: CheckpointPath) -> Manifest:
        """Return the manifest of a checkpoint that the caller may read, without reading its files."""
        return await self.checkpoints.describe(path, self._may_read)

    async def open_checkpoint(
        self, path: CheckpointPath, bases: Bases, *, may_be_encrypted: bool = False
    ) -> tuple[ServedBase, OpenCheckpoint]:
        """Open a checkpoint that the caller may load or sample from: their own, or a published one."""
        base = bases.of_checkpoint(path, await self.describe_checkpoint(path))
        opened = await self.checkpoints.open(
            path, base.checkpoints, self._may_read, may_be_encrypted=may_be_encrypted
        )
        return base, opened

    async def problem_loading(self, path: str, token: str | None, keyring: Keyring) -> str | None:
        """Say why the caller may not load a path; None: they may. Their own save may still be running."""
        try:
            parsed, reader = checkpoint_paths.parse(path), self.reading_with(token, keyring)
            try:
                await self.model(parsed.run_id)
            except NotFound:
                await self.checkpoints.find(parsed, reader._may_read)
        except RequestError as error:
            return str(error)
        return None

    def _may_read(self, row: CheckpointRow) -> bool:
        readers = (self.caller,) if self.lender is None else (self.caller, self.lender)
        return row.is_public or any(reader.sees(row.owner) for reader in readers)

    async def _check(self, session_id: str, missing: NotFound) -> None:
        if not self.caller.sees((await self.catalog.session(session_id)).owner):
            raise missing
