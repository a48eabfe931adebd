"""Reads which checkpoint the path of a route names."""

from litestar.params import FromPath

from spmd_tx.coordinator.http.services import ApiCall
from spmd_tx.coordinator.http.unknown_parameters import refuse_parameters
from spmd_tx.coordinator.wire import checkpoint_paths
from spmd_tx.coordinator.wire.checkpoint_paths import CheckpointPath

OF_THE_SDK = "x-stainless-package-version"  # a header that the SDK sends with each request


async def provide_address(
    call: ApiCall, run_id: FromPath[str], kind: FromPath[str], name: FromPath[str]
) -> CheckpointPath:
    """Return the checkpoint that the route's path names; it need not exist.

    Raises InvalidRequest where the SDK, which puts names into URLs as they are, may mean another one, and for
    parameters that the route does not know.
    """
    path = checkpoint_paths.parse(f"tinker://{run_id}/{kind}/{name}")
    if OF_THE_SDK in call.request.headers:
        await call.check_meant(path)
    refuse_parameters(call.request)
    return path
