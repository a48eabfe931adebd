"""Opens consoles without browsers: `python -m tests.console.open_consoles URL RUN PAGE COUNT`, for bench.py.

It reads "open" and "close" from standard input, and says each back when it is done. Each console asks for
what the page in console/src/pages asks for, as often.
"""

import asyncio
import json
import sys
from collections.abc import Awaitable, Callable

import httpx

SECONDS = 120

Console = Callable[[httpx.AsyncClient, str, float], Awaitable[None]]  # with its phase, 0 to 1


async def run_page(client: httpx.AsyncClient, run: str, _: float) -> None:
    after = -1
    async with client.stream("GET", "stream") as stream:
        async for line in stream.aiter_lines():
            if line.startswith("data:") and run in json.loads(line.removeprefix("data:"))["runs"]:
                await client.get(f"runs/{run}")
                points = (await client.get(f"runs/{run}/metrics?after={after}")).json()["points"]
                after = points[-1]["seq"] if points else after


def polling(path: str, seconds: float) -> Console:
    async def page(client: httpx.AsyncClient, run: str, phase: float) -> None:
        await asyncio.sleep(phase * seconds)
        while True:
            (await client.get(path.format(run=run))).raise_for_status()
            await asyncio.sleep(seconds)

    return page


PAGES: dict[str, Console] = {
    "run": run_page,
    "timing": polling("runs/{run}/timing?seconds=300", 3.0),
    "samples": polling("runs/{run}/samples?limit=20", 5.0),
    "server": polling("server", 3.0),
}


async def one(url: str, run: str, page: str, phase: float) -> None:
    async with httpx.AsyncClient(base_url=f"{url}/console/api/", timeout=SECONDS) as client:
        await PAGES[page](client, run, phase)


async def main(url: str, run: str, page: str, count: int) -> None:
    consoles: list[asyncio.Task[None]] = []
    while word := (await asyncio.to_thread(sys.stdin.readline)).strip():
        for console in consoles:
            console.cancel()
        for ended in await asyncio.gather(*consoles, return_exceptions=True):
            if not isinstance(ended, asyncio.CancelledError):
                raise RuntimeError("a console has ended by itself") from ended
        wanted = count if word == "open" else 0
        consoles = [asyncio.create_task(one(url, run, page, number / count)) for number in range(wanted)]
        print(word, flush=True)
    for console in consoles:
        console.cancel()


if __name__ == "__main__":
    _, url, run, page, count = sys.argv
    asyncio.run(main(url, run, page, int(count)))
