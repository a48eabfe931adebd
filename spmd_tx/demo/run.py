"""Runs the demo: writes a tiny model, starts a server and trains with docs/examples/rl_demo.py."""

import importlib.util
import os
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import ModuleType

from rich.console import Console

from spmd_tx.demo import tiny_model
from spmd_tx.demo.display import Display, Told, draw_curve, program, save_plot
from spmd_tx.errors import StartError
from spmd_tx.processes.environments import proxies
from spmd_tx.processes.parent import tied

USUAL_FAMILY = "qwen3"
SUPERVISED_STEPS = 8
RANK = 16
START_TIMEOUT = 180.0  # seconds
STARTING = "starting the server"
STOP_TIMEOUT = 20.0  # seconds

# Thresholds for the mean rewards of the first and the last five steps.
FIRST_AT_MOST = 0.2
LAST_AT_LEAST = 0.6
ENOUGH_STEPS = 30  # to reach it; fewer are not judged by it
FLAT_WITHIN = 0.1  # with learning rate 0

# Takes the server, the run, and metrics of its newest step.
TellMetrics = Callable[[str, str, dict[str, float]], None]


@dataclass(frozen=True)
class DemoOptions:
    """How the demo is run."""

    learning_rate: float
    steps: int  # of reinforcement learning
    out: Path
    family: str = USUAL_FAMILY
    full_parameters: bool = False
    keep: bool = False  # the server open behind the end

    @property
    def folder(self) -> Path:
        """Where model, data and plot are; a server's data belong to one model."""
        family = [] if self.family == USUAL_FAMILY else [self.family]
        return self.out.joinpath(*family, *(["full"] if self.full_parameters else []))


def run(options: DemoOptions, report: TellMetrics) -> int:
    """Run the demo and return its exit code: 0 if the reward went as it should."""
    for package in ("tinker", "grain", "matplotlib"):
        if importlib.util.find_spec(package) is None:
            raise StartError(
                f"the demo needs the package {package}; install it with: pip install 'spmd_tx[demo]'"
            )
    import tinker

    environment = dict(os.environ)
    for name in proxies(environment):
        del os.environ[name]  # all that the demo connects to is its own server
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")  # the warning advises installing PyTorch
    console = Console(markup=False, highlight=False)
    started = time.monotonic()
    out = options.folder
    spec = replace(tiny_model.PRESETS["tiny"], family=options.family)
    model = tiny_model.write(out / "model", spec).resolve()
    log = ServerLog(out / "server.log")
    try:
        with serving(str(model), log, console, environment, full_parameters=options.full_parameters) as url:
            with Display(console, log.status) as display:
                answer = drive(url, str(model), options, display, partial(report, url))
            complaint = _show_result(console, options, display, answer, time.monotonic() - started)
            if options.keep:
                _wait(console, url)
    except (tinker.TinkerError, ServerEnded) as error:
        console.print(f"the demo failed: {error}; see the server's log in {log.path}", soft_wrap=True)
        return 1
    return 1 if complaint else 0


def drive(
    url: str,
    base_model: str,
    options: DemoOptions,
    display: Display,
    report: Callable[[str, dict[str, float]], None],
) -> str:
    """Train as a user's script does, show each step, and return the final answer."""
    example = load_example()
    service = example.tinker.ServiceClient(base_url=url, api_key="tml-demo")
    rank, rate = 0 if options.full_parameters else RANK, options.learning_rate
    metadata = {"name": "demo"}
    trainer = service.create_lora_training_client(
        base_model, rank=rank, seed=0, user_metadata=metadata
    ).result()
    tokenizer, run_id = trainer.get_tokenizer(), trainer.get_info().model_id
    for step in example.supervised_steps(trainer, tokenizer, rate, SUPERVISED_STEPS):
        display.add(step)
    for step in example.reinforcement_steps(trainer, tokenizer, rate, options.steps):
        display.add(step)
        report(run_id, {"reward": step.reward})
    answer = example.sample_from_saved_state(service, trainer, tokenizer)
    service.close("success").result()
    return answer


def _show_result(
    console: Console, options: DemoOptions, display: Display, answer: str, seconds: float
) -> str | None:
    """Draw the rewards, say what to do next, and return what is wrong with them."""
    rewards, out = display.rewards, options.folder
    console.print(draw_curve(rewards))
    save_plot(display.steps, out / "reward.png")
    lines = [
        f"a sample from the saved and reloaded state: {answer!r}",
        f"reward {rewards[0]:.2f} -> {rewards[-1]:.2f} in {seconds:.0f} s; plot: {out / 'reward.png'}",
    ]
    complaint = judge(rewards, options.learning_rate)
    if complaint:
        lines.append(f"the demo failed: {complaint}")
    else:
        again = f"{program()} serve --base-model {out / 'model'} --data-dir {out / 'server'}"
        again += " --full-parameters" if options.full_parameters else ""
        lines += [
            "what next:",
            f"  {again}   # its console shows this run",
            f"  {program()} train sl data.jsonl   # beside it, on a file of yours; docs/train_command.md",
            "  docs/examples/rl_demo.py   # the loop that has just run: copy it, and write your own reward",
        ]
    console.print("\n".join(lines), soft_wrap=True)
    return complaint


def _wait(console: Console, url: str) -> None:
    """Leave the server running until Ctrl-C."""
    console.print(f"the server and its console stay open: {url}/console; Ctrl-C ends both", soft_wrap=True)
    with suppress(KeyboardInterrupt):
        threading.Event().wait()


def load_example() -> ModuleType:
    """Import the script that users copy: it is in the installed package, or in docs/ of a checkout."""
    here = Path(__file__).parents[1]
    candidates = [here / "examples" / "rl_demo.py", here.parent / "docs" / "examples" / "rl_demo.py"]
    path = next(path for path in candidates if path.exists())
    spec = importlib.util.spec_from_file_location("rl_demo", path)
    assert spec is not None
    assert spec.loader is not None
    example = importlib.util.module_from_spec(spec)
    sys.modules["rl_demo"] = example
    spec.loader.exec_module(example)
    return example


def judge(rewards: list[float], learning_rate: float) -> str | None:
    """Return what is wrong with the rewards, or None."""
    first, last = sum(rewards[:5]) / 5, sum(rewards[-5:]) / 5
    if first > FIRST_AT_MOST:
        return f"the reward of the first five steps is {first:.2f}; it should be at most {FIRST_AT_MOST}"
    if learning_rate == 0 and abs(last - first) > FLAT_WITHIN:
        return f"the reward went from {first:.2f} to {last:.2f} although the learning rate is 0"
    if learning_rate > 0 and len(rewards) >= ENOUGH_STEPS and last < LAST_AT_LEAST:
        return f"the reward of the last five steps is {last:.2f}; it should have reached {LAST_AT_LEAST}"
    return None


class ServerEnded(Exception):
    """The server has ended while it was needed."""


class ServerLog:
    """Reads what a server prints, from a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def lines(self) -> list[str]:
        return self.path.read_text().splitlines()

    def url(self) -> str | None:
        """Return the server's address; None until it is ready."""
        return next(
            (line.removeprefix("ready: ") for line in self.lines() if line.startswith("ready: ")), None
        )

    def status(self) -> str:
        """Return what the workers are busy with; empty while they run commands."""
        reports = [line.partition("workers: ")[2] for line in self.lines() if "workers: " in line]
        return reports[-1] if reports and reports[-1] != "running" else ""


@contextmanager
def serving(
    base_model: str,
    log: ServerLog,
    console: Console,
    environment: dict[str, str] | None = None,
    *,
    full_parameters: bool = False,
) -> Iterator[str]:
    """Start the server as a user would, wait until it is ready, and stop it at the end."""
    data_dir = log.path.with_name("server")
    command = [str(Path(sys.executable).with_name("spmd-tx")), "serve", "--num-processes", "1"]
    command += ["--base-model", base_model, "--port", "0", "--data-dir", str(data_dir)]
    command += ["--warm-up", "off"]  # the demo needs few programs, and this computer may have few cores
    command += ["--full-parameters"] if full_parameters else []
    console.print("$ " + shlex.join(command), soft_wrap=True)
    with log.path.open("w") as file:
        # In its own session, so that Ctrl-C ends the demo, which then stops the server in order.
        server = subprocess.Popen(
            tied(command), stdout=file, stderr=file, env=environment, start_new_session=True
        )
    try:
        url = wait_until_ready(server, log, console)
        with needing(server):
            yield url
    finally:
        server.terminate()
        try:
            server.wait(STOP_TIMEOUT)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()


@contextmanager
def needing(server: subprocess.Popen[bytes]) -> Iterator[None]:
    """Raise ServerEnded in the main thread if the server ends; clients would try again for hours."""
    is_over, main_thread = threading.Event(), threading.get_ident()
    # Not SIGINT, which is ignored where a shell has started this in the background.
    before = signal.signal(signal.SIGUSR1, signal.default_int_handler)

    def watch() -> None:
        while not is_over.wait(0.2):
            if server.poll() is not None:
                signal.pthread_kill(main_thread, signal.SIGUSR1)  # which ends what it waits for
                return

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        yield
    except KeyboardInterrupt:
        if server.poll() is None:  # Ctrl-C
            raise
        raise ServerEnded(f"the server ended with code {server.returncode}") from None
    finally:
        is_over.set()
        watcher.join()
        signal.signal(signal.SIGUSR1, before)


def wait_until_ready(server: subprocess.Popen[bytes], log: ServerLog, console: Console) -> str:
    """Return the server's address. Raises StartError."""
    deadline = time.monotonic() + START_TIMEOUT
    tell = Told(console)
    with console.status(STARTING) as status:
        while (url := log.url()) is None:
            if server.poll() is not None:
                tail = "\n".join(log.lines()[-5:])
                raise StartError(
                    f"the server ended with code {server.returncode}; {log.path} ends with:\n{tail}"
                )
            if time.monotonic() > deadline:
                raise StartError(f"the server was not ready after {START_TIMEOUT:.0f} s; see {log.path}")
            tell.news(phase := log.status() or STARTING)
            status.update(phase)
            time.sleep(0.2)
    return url
