"""Leads to the pages of this console from the server's address, and from those of ``get_console_url``.

The SDK names a host that it has in its source; the rest of the address is the same here.
"""

from urllib.parse import quote

from litestar import Controller, get
from litestar.params import FromPath, FromQuery
from litestar.response import Redirect

from spmd_tx.coordinator.http.authentication import OPEN


class LinksController(Controller):
    opt = OPEN  # an address tells nothing; the page that it leads to needs a key
    include_in_schema = False

    @get("/")
    async def root(self) -> Redirect:
        """Lead people who have opened the server's address to the console."""
        return Redirect("/console")

    @get("/training_runs/{run_id:str}")
    async def training_run(self, run_id: FromPath[str]) -> Redirect:
        """Lead to the page of the run."""
        return Redirect("/console/runs/" + quote(run_id, safe=":"))

    @get(["/sessions", "/sessions/{session_id:str}"])
    async def session(self) -> Redirect:
        """Lead to the runs: the console has no page of a single session."""
        return Redirect("/console")

    @get("/checkpoints/{run_id:str}/{checkpoint_id:path}")
    async def checkpoint(self) -> Redirect:
        """Lead to the list of checkpoints, where each can be found by its run and name."""
        return Redirect("/console/checkpoints")

    @get("/playground")
    async def playground(self, checkpoint: FromQuery[str] = "") -> Redirect:
        """Lead to the playground, with the checkpoint of the given ``tinker://`` path."""
        query = f"?model={quote(checkpoint, safe='')}" if checkpoint else ""
        return Redirect(f"/console/playground{query}")
