"""``spmd-tx watch`` runs a script, and sends what it logs to the server, for the console to show."""

import os
import secrets
import signal
import subprocess
import time
from collections import deque
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import quote

import typer

from spmd_tx.cli import script_logs
from spmd_tx.cli.script_logs import JSON_LINES, WANDB, JsonLines, LoggedStep
from spmd_tx.cli.server import LOCAL, ApiKeyOption, Server, Unreachable, UrlOption
from spmd_tx.errors import StartError

if TYPE_CHECKING:
    from spmd_tx.cli.wandb_files import WandbFile

EVERY_SECONDS = 1.0
PATIENCE_SECONDS = 10.0  # for a server, after the script has ended
LIST_SECONDS = 1.1  # after which a list of runs is none that the server has kept (http/shared_answers.py)
MOST_METRICS = 256  # of one request
MOST_WAITING = 10_000  # steps, until the script has a run
MOST_NAMED = 3  # logs in a message
OF_SIGNALS = 128  # added to the number of a signal in the exit codes of shells
STOPS = (signal.SIGHUP, signal.SIGINT, signal.SIGKILL, signal.SIGTERM)  # that others send, not faults
TAGS = "TINKER_TAGS"  # which the SDK sends with its sessions, separated by commas


def watch(
    command: Annotated[list[str], typer.Argument(metavar="COMMAND", help="Script to run, behind --.")],
    log: Annotated[
        Path | None,
        typer.Option(
            help="Its metrics.jsonl or .wandb file, or the folder of one. Default: found by itself."
        ),
    ] = None,
    url: UrlOption = LOCAL,
    api_key: ApiKeyOption = "",
) -> None:
    """Run a script, and show the metrics that it logs in the console.

    spmd-tx watch -- python -m tinker_cookbook.recipes.rl_loop

    The script is not changed. Its log is metrics.jsonl, as recipes of
    tinker-cookbook write it, or the file of wandb, which may be offline. When
    it has ended, the server is told how.
    """
    tag = f"watch-{secrets.token_hex(8)}"
    environment = os.environ | {TAGS: ",".join(filter(None, [os.environ.get(TAGS), tag]))}
    watcher = _Watcher(Server(url, api_key), url, tag, [log] if log else script_logs.named_folders(command))
    try:
        process = subprocess.Popen(command, env=environment)
    except OSError as error:
        raise StartError(f"cannot run {command[0]}: {error.strerror}") from None

    def pass_on(number: int, _: FrameType | None) -> None:
        if number != signal.SIGINT:  # the terminal sends that to the script, too
            process.send_signal(number)

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, pass_on)
    has_ended = False
    while not has_ended:
        has_ended = process.poll() is not None  # before the look, which then sees all
        watcher.look(None if has_ended else process.pid)
        if not has_ended:
            with suppress(subprocess.TimeoutExpired):
                process.wait(EVERY_SECONDS)
    code = process.returncode
    watcher.end(code)
    raise typer.Exit(code if code >= 0 else OF_SIGNALS - code)


def ending(code: int) -> dict[str, Any]:
    """Say how a script has ended, as a client says it of its session. ``code``: below 0, of a signal."""
    if code == 0:
        return {"reason": {"type": "success"}}
    number = -code if code < 0 else code - OF_SIGNALS
    if number in STOPS:
        return {"reason": {"type": "interrupted"}, "detail": f"the script got {signal.Signals(number).name}"}
    end = f"exit code {code}" if code > 0 else signal.strsignal(number) or f"signal {number}"
    return {"reason": {"type": "errored"}, "detail": f"the script ended with {end}"}


class _Watcher:
    """Follows the logs of one script, sends what is new, and at last how the script has ended."""

    def __init__(self, server: Server, url: str, tag: str, places: list[Path]) -> None:
        self._server, self._url, self._tag = server, url, tag
        self._began = time.time()
        self._places = places  # to be looked at besides what the script has open
        self._below = script_logs.logs_below(Path.cwd())
        self._sizes = self._below | {path: path.stat().st_size for path in self._files()}
        self._readers: dict[Path, JsonLines | WandbFile] = {}
        self._waiting: deque[LoggedStep] = deque(maxlen=MOST_WAITING)
        self._run: str | None = None
        self._said: set[str] = set()

    def look(self, process: int | None) -> None:
        """Read what is new, and send it. ``process``: whose open files are looked for; None: it has ended."""
        paths = self._files() | (set() if process is None else script_logs.open_logs(process))
        if process is None and not self._readers and not paths:
            paths = self._grown()
        for path in paths:
            if path not in self._readers and path.is_file():
                self._readers[path] = self._reader(path)
        for reader in self._readers.values():
            try:
                self._waiting.extend(reader.news())
            except OSError as error:
                self._say(f"cannot read {error.filename}: {error.strerror}")
        try:
            self._send()
        except Unreachable:
            pass  # the next look tries again
        except StartError as error:
            self._say(str(error))

    def end(self, code: int) -> None:
        """Send what is left, and how the script has ended. Says so where that is not possible."""
        time.sleep(LIST_SECONDS)  # the script may have opened a run just now
        until = time.monotonic() + (PATIENCE_SECONDS if self._waiting or self._run else 0.0)
        while True:
            try:
                self._send()
                self._finish(code)
                break
            except Unreachable as error:
                if time.monotonic() > until:
                    self._say(f"the end, and {len(self._waiting)} steps before it, were not sent: {error}")
                    return
                time.sleep(EVERY_SECONDS)
            except StartError as error:
                self._say(str(error))
                return
        if self._waiting:
            self._say("the script has logged metrics, but has opened no training run on this server")
        elif not self._readers:
            self._say("no log was found; name it with --log")

    def _grown(self) -> set[Path]:
        """Return the log that has grown in the current folder since the start, if no other has.

        The script has ended, so those that are open are of others.
        """
        now, of_others = script_logs.logs_below(Path.cwd()), script_logs.logs_in_use()
        grown = [path for path in now.keys() - of_others if now[path] > self._below.get(path, 0)]
        if len(grown) > 1:
            names = ", ".join(str(path.relative_to(Path.cwd())) for path in sorted(grown)[:MOST_NAMED])
            self._say(f"{len(grown)} logs have grown, such as {names}")
        return set(grown) if len(grown) == 1 else set()

    def _files(self) -> set[Path]:
        """Return the logs in the places that were named."""
        found = set[Path]()
        for place in self._places:
            if place.is_dir():
                found |= {place / JSON_LINES, *place.glob(f"**/*{WANDB}")}
            else:
                found.add(place if place.suffix else place / JSON_LINES)
        return {path for path in found if path.is_file()}

    def _reader(self, path: Path) -> "JsonLines | WandbFile":
        if path.suffix == WANDB:
            from spmd_tx.cli.wandb_files import WandbFile

            return WandbFile(path)
        # Lines of an earlier start belong to another run.
        facts = path.stat()
        before = self._sizes.get(path, facts.st_size if facts.st_mtime < self._began else 0)
        return JsonLines(path, before)

    def _send(self) -> None:
        if self._waiting and self._run is None:
            self._run = self._find()
        while self._waiting and self._run is not None:
            step, metrics = self._waiting[0].step, self._waiting[0].metrics()
            names = sorted(metrics)
            for start in range(0, len(names), MOST_METRICS):
                some = {name: metrics[name] for name in names[start : start + MOST_METRICS]}
                body = {"metrics": some} | ({} if step is None or step < 0 else {"step": step})
                try:
                    self._server.ask(f"training_runs/{quote(self._run, safe='')}/metrics", body)
                except Unreachable:
                    raise
                except StartError as error:
                    self._say(str(error))
            self._waiting.popleft()

    def _find(self) -> str | None:
        """Return the newest run that the script has opened."""
        run = next((run["id"] for run in self._opened()), None)
        if run is not None:
            self._say(f"metrics are at {self._url.rstrip('/')}/console/runs/{quote(run, safe=':')}")
        return run

    def _finish(self, code: int) -> None:
        """End the sessions of the script's runs; what it has said of their ends itself stays."""
        for session in {run["session_id"] for run in self._opened() if run["is_open"]}:
            self._server.ask(f"sessions/{quote(session, safe='')}/finish", ending(code))

    def _opened(self) -> list[dict[str, Any]]:
        """Return the runs that the script has opened, the newest first."""
        listed = self._server.ask("/console/api/runs?limit=100&archived=true")["runs"]
        return [run for run in listed if self._tag in run["tags"]]

    def _say(self, text: str) -> None:
        """Say something once."""
        if text not in self._said:
            self._said.add(text)
            typer.echo(f"spmd-tx watch: {text}", err=True)
