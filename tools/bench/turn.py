"""One turn of one server: started with nothing compiled, timed section by section, started once more.

Runs in the environment of the peer, whose release of the SDK talks to both servers; compare.py starts it.
"""

import argparse
import json
import logging
import os
import shutil
import signal
import sys
import time
import traceback
from dataclasses import replace
from pathlib import Path
from typing import Any

import tinker

from tools.bench import sections
from tools.bench.client import Client
from tools.bench.figures import FIRST_MINUTE, SECTIONS
from tools.bench.servers import Server, launcher

START_SECONDS = 300.0

ERRORS = (tinker.TinkerError, TimeoutError, RuntimeError, ValueError, OSError, AttributeError, LookupError)


class Turn:
    """Its results go to the file whenever there is a new one."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.arguments = arguments
        self.load = sections.LOADS[arguments.load]
        if arguments.quick:
            self.load = replace(sections.SMOKE, vocab_size=self.load.vocab_size)
        self.limits = sections.Limits()
        if arguments.quick:
            self.limits = replace(
                self.limits,
                repeats=2,
                seconds=5.0,
                fresh_rounds=2,
                tenants_warmup=5.0,
                tenants_seconds=8.0,
                calls=5,
            )
        self.results: dict[str, Any] = {}
        self.peak_mib = 0.0
        self.starts = 0

    def run(self) -> None:
        server = self._start("start" if self.arguments.cache else "cold_start")
        try:
            self._settle(server)
            timed = self._sections(server)
            for name in self.arguments.sections:
                if not self._section(timed, server, name):
                    self._close(server)
                    server = self._start("start_after_error")
                    timed = self._sections(server)
        finally:
            self._close(server)
        self._keep("memory", {"peak_mib": self.peak_mib})
        self._close(self._start("warm_start"))
        if self.arguments.first_minute:
            self._first_minute()

    def _first_minute(self) -> None:
        """Time each section on a server of its own, which has just started with nothing compiled."""
        for name in self.arguments.sections:
            cache = self.arguments.folder / "empty cache"
            server = self._start(FIRST_MINUTE + "start", cache)
            try:
                self._section(self._sections(server), server, name, FIRST_MINUTE)
            finally:
                self._close(server)
                shutil.rmtree(cache, ignore_errors=True)

    def _settle(self, server: Server) -> None:
        has_settled = server.wait_until_idle(self.arguments.settle_seconds)
        result = {"seconds": [server.age()], "cpu_s": server.cpu_seconds()}
        if not has_settled:
            result |= {"error": f"still busy {server.age():.0f} s after the start"}
        self._keep("settled", result)

    def _sections(self, server: Server) -> sections.Sections:
        return sections.Sections(server.url, self.arguments.model, self.load, self.limits, server.cpu_seconds)

    def _start(self, name: str, cache: Path | None = None) -> Server:
        """Start with new data and with what earlier starts have compiled, and wait for the first sample."""
        arguments = self.arguments
        self.starts += 1
        folder = arguments.folder / f"start{self.starts}"
        kept: Path = cache or arguments.cache or arguments.folder / "cache"
        launch = launcher(arguments.side, arguments.server_python, Path(arguments.model), folder, kept)
        server = Server(launch, arguments.folder / "server.log")
        try:
            healthy = server.wait_until_healthy(START_SECONDS)
            client = Client(server.url, arguments.model, self.load.vocab_size)
            client.deadline = time.monotonic() + START_SECONDS
            client.sample(client.base_sampler(), [client.text(4)], [16], 1)
            self._keep(name, {"healthy_s": healthy, "seconds": [server.age()]})
        except ERRORS as error:
            self._close(server)
            raise RuntimeError(f"no first sample: {error!r}; see {server.log}") from error
        return server

    def _section(self, timed: sections.Sections, server: Server, name: str, when: str = "") -> bool:
        """Whether it came to its end."""
        began = time.monotonic()
        timed.client.deadline = began + self.arguments.section_deadline
        try:
            result = getattr(timed, name)()
        except ERRORS as error:
            result = {"error": repr(error)[:500], "trace": traceback.format_exc()[-1500:]}
        self._keep(when + name, result | {"wall_s": time.monotonic() - began, "rss_mib": server.rss_mib()})
        return "error" not in result

    def _close(self, server: Server) -> None:
        server.close()
        self.peak_mib = max(self.peak_mib, server.peak_mib)

    def _keep(self, name: str, result: dict[str, Any]) -> None:
        self.results[name] = result
        report = {"side": self.arguments.side, "sdk": tinker.__version__, "results": self.results}
        self.arguments.out.write_text(json.dumps(report, indent=1) + "\n")
        print(f"  {self.arguments.side}: {name}: {describe(result)}", flush=True)


def describe(result: dict[str, Any]) -> str:
    """A line of progress."""
    if "error" in result:
        return result["error"]
    seconds, tokens = result.get("seconds", []), result.get("tokens")
    parts = [f"{value:.3g} {name}" for name, value in result.items() if isinstance(value, int | float)]
    if tokens and sum(tokens) > len(tokens):
        parts.insert(0, f"{sum(tokens) / sum(seconds):.0f} tokens/s")
    elif seconds:
        parts.insert(0, f"{sum(seconds) / len(seconds):.3g} s on average")
    return ", ".join(parts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--side", choices=("ours", "peer"), required=True)
    parser.add_argument("--server-python", type=Path, required=True, help="of our environment")
    parser.add_argument("--model", required=True)
    parser.add_argument("--load", choices=tuple(sections.LOADS), required=True)
    parser.add_argument("--sections", nargs="+", choices=SECTIONS, default=SECTIONS)
    parser.add_argument("--folder", type=Path, required=True, help="empty; for data and logs")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--settle-seconds", type=float, default=400.0)
    parser.add_argument("--cache", type=Path, help="of compiled programs, instead of an empty one")
    parser.add_argument("--section-deadline", type=float, default=240.0, help="seconds")
    parser.add_argument(
        "--first-minute", action="store_true", help="time sections with nothing compiled, too"
    )
    parser.add_argument("--quick", action="store_true")
    logging.getLogger("tinker").setLevel(
        logging.ERROR
    )  # that sampling waits while something compiles is known
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    arguments, code = parser.parse_args(), 1
    try:
        Turn(arguments).run()
        code = 0
    except RuntimeError as error:
        print(error, file=sys.stderr)
    except Exception:
        traceback.print_exc()  # nothing else says it, with the exit below
    finally:
        sys.stdout.flush()
        os._exit(code)  # the SDK's threads would wait for more


if __name__ == "__main__":
    main()
