"""``spmd-tx train`` trains on a file of data, or on a reward, with a server that runs."""

import importlib
import importlib.util
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal
from urllib.parse import quote

import typer

from spmd_tx.cli import consoles, train_output
from spmd_tx.cli.server import LOCAL, ApiKeyOption, Server, Unreachable, UrlOption
from spmd_tx.demo.display import draw_curve
from spmd_tx.errors import StartError
from spmd_tx.processes.interrupts import ended_by_interrupts
from spmd_tx.protocol.optimizers import OptimizerName

if TYPE_CHECKING:
    from spmd_tx.train.folder import RunFolder, RunPlace
    from spmd_tx.train.loop import Kind, Schedule
    from spmd_tx.train.rendering import Renderer
    from spmd_tx.train.session import Job, TrainSession

PATIENCE_SECONDS = 20.0  # for a server that is being started
PACKAGES = ("tinker", "grain")
SLOW_TO_IMPORT = ("transformers.models.auto.tokenization_auto", "spmd_tx.train.kinds")

train = typer.Typer(
    name="train",
    no_args_is_help=True,
    help="Train on a file of data, or on a reward, with a server that runs. See docs/train_command.md.",
)

BaseModelOption = Annotated[str | None, typer.Option(help="Model to train, if the server has several.")]
StartOption = Annotated[
    str | None, typer.Option("--from", help="Checkpoint whose weights to begin with: tinker://...")
]
RankOption = Annotated[int, typer.Option(min=0, help="Rank of the adapter; 0 trains all weights.")]
OptimizerOption = Annotated[OptimizerName, typer.Option(help="Optimizer; dimuon is for adapters alone.")]
RateOption = Annotated[
    float | None, typer.Option(min=0, help="Learning rate of the first step. Default: by the optimizer.")
]
ShapeOption = Annotated[
    Literal["constant", "linear", "cosine"], typer.Option(help="Course of the learning rate.")
]
SeedOption = Annotated[int, typer.Option(min=0, help="Seed of the adapter, of the order, and of answers.")]
SaveEvery = Annotated[int, typer.Option(min=1, help="Steps between two checkpoints to go on from.")]
EvalEvery = Annotated[int, typer.Option(min=1, help="Steps between two evaluations.")]
OutOption = Annotated[
    Path, typer.Option(help="Folder of the run; the same command goes on with what is in it.")
]


@train.command()
def sl(
    data: Annotated[Path, typer.Argument(metavar="DATA", help="File with one JSON object per line.")],
    evaluate: Annotated[Path | None, typer.Option("--eval", help="File of rows to evaluate on.")] = None,
    epochs: Annotated[float, typer.Option(min=0.001, help="How often to go through the data.")] = 3,
    steps: Annotated[int | None, typer.Option(min=1, help="Number of steps, instead of --epochs.")] = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Rows, or pairs, of a step.")] = 16,
    max_length: Annotated[
        int | None, typer.Option(min=2, help="Tokens that are kept of a row. Default: the model's context.")
    ] = None,
    beta: Annotated[float, typer.Option(min=0, help="Of preferences: how much the base model holds.")] = 0.1,
    optimizer: OptimizerOption = "adamw",
    learning_rate: RateOption = None,
    schedule: ShapeOption = "linear",
    rank: RankOption = 32,
    seed: SeedOption = 0,
    save_every: SaveEvery = 50,
    eval_every: EvalEvery = 50,
    base_model: BaseModelOption = None,
    start: StartOption = None,
    out: OutOption = Path("runs/sl"),
    url: UrlOption = LOCAL,
    api_key: ApiKeyOption = "",
) -> None:
    """Fine-tune on a file of conversations, completions, texts or preferences.

    A row is {"messages": [...]}, of which the assistant's turns are learned;
    {"prompt": "...", "completion": "..."}; {"text": "..."}; or {"prompt": ...,
    "chosen": ..., "rejected": ...}, for direct preference optimization.
    """
    _import_packages()
    from spmd_tx.train.folder import digest
    from spmd_tx.train.loop import Schedule
    from spmd_tx.train.optimizers import OPTIMIZERS
    from spmd_tx.train.rows import read_rows
    from spmd_tx.train.session import Job

    rows, held_out = read_rows(data), read_rows(evaluate) if evaluate else []
    count = steps or max(1, round(epochs * len(rows) / batch_size))
    chosen = OPTIMIZERS[optimizer]
    rate = chosen.supervised_rate if learning_rate is None else learning_rate
    plan = Schedule(count, chosen, rate, schedule, save_every, eval_every)
    settings = {"data": digest(data), "--batch-size": batch_size, "--max-length": max_length, "--beta": beta}

    def make(trainer: Any, renderer: "Renderer", folder: "RunFolder") -> "Kind":
        from spmd_tx.train.kinds import of_rows

        return of_rows(trainer, renderer, folder, (rows, held_out), (batch_size, seed, beta))

    job = Job(url, api_key, base_model, start, rank, seed, out)
    run(job, plan, settings, make, max_length)


@train.command()
def rl(
    environment: Annotated[
        Path,
        typer.Argument(metavar="ENVIRONMENT", help="Python file with PROMPTS and reward(prompt, answer)."),
    ],
    steps: Annotated[int, typer.Option(min=1, help="Number of steps.")] = 100,
    batch_size: Annotated[int, typer.Option(min=1, help="Prompts of a step.")] = 16,
    group_size: Annotated[int, typer.Option(min=2, help="Answers to each prompt.")] = 8,
    max_tokens: Annotated[int, typer.Option(min=1, help="Maximum number of tokens of an answer.")] = 256,
    temperature: Annotated[float, typer.Option(min=0.01, help="Temperature of the answers.")] = 1.0,
    optimizer: OptimizerOption = "adamw",
    learning_rate: RateOption = None,
    schedule: ShapeOption = "constant",
    rank: RankOption = 32,
    seed: SeedOption = 0,
    save_every: SaveEvery = 20,
    eval_every: EvalEvery = 20,
    base_model: BaseModelOption = None,
    start: StartOption = None,
    out: OutOption = Path("runs/rl"),
    url: UrlOption = LOCAL,
    api_key: ApiKeyOption = "",
) -> None:
    """Train on a reward of your own.

    The file defines PROMPTS, a list of strings, of conversations, or of dicts
    whose "prompt" is either; and reward(prompt, answer), which returns a
    number. EVAL_PROMPTS, if there are any, are answered greedily.
    """
    _import_packages()
    from spmd_tx.train import environment as environments
    from spmd_tx.train.folder import digest
    from spmd_tx.train.loop import Schedule
    from spmd_tx.train.optimizers import OPTIMIZERS
    from spmd_tx.train.session import Job

    loaded = environments.load(environment)
    chosen = OPTIMIZERS[optimizer]
    rate = chosen.reinforcement_rate if learning_rate is None else learning_rate
    plan = Schedule(steps, chosen, rate, schedule, save_every, eval_every)
    settings = {
        "environment": digest(environment),
        "--batch-size": batch_size,
        "--group-size": group_size,
        "--max-tokens": max_tokens,
        "--temperature": temperature,
    }

    def make(trainer: Any, renderer: "Renderer", folder: "RunFolder") -> "Kind":
        from spmd_tx.train.reinforcement import Drawing, Reinforcement

        drawing = Drawing(batch_size, group_size, max_tokens, temperature, seed)
        return Reinforcement(trainer, renderer, loaded, drawing)

    run(Job(url, api_key, base_model, start, rank, seed, out), plan, settings, make)


def run(
    job: "Job",
    plan: "Schedule",
    settings: Mapping[str, Any],
    make: Callable[[Any, "Renderer", "RunFolder"], "Kind"],
    max_length: int | None = None,
) -> None:
    """Train, and say how to use what came of it. Raises StartError."""
    from spmd_tx.train import loop, session
    from spmd_tx.train.folder import RunFolder
    from spmd_tx.train.rendering import Renderer

    server, console = Server(job.url, job.api_key), consoles.console()
    with console.status(f"looking for {job.url}"):
        served = {each["model_name"]: each for each in _capabilities(server)["supported_models"]}
    model = session.choose_model(job.base_model, list(served))
    known = {
        **settings,
        "--base-model": model,
        "--from": job.start,
        "--rank": job.rank,
        "--seed": job.seed,
        "number of steps": plan.steps,
        "--optimizer": plan.optimizer.name,
        "--learning-rate": plan.learning_rate,
        "--schedule": plan.shape,
    }
    folder = RunFolder(job.out, known)
    if folder.place.final is not None:
        console.print(f"the run in {job.out} has ended; name another --out for a new one")
        _say_how_to_use(console, job, folder.place)
        return
    if folder.place.step:
        console.print(f"going on with the run in {job.out} at step {folder.place.step} of {plan.steps}")
    client = session.TrainSession(job)
    with _told_to(client, folder), console.status(f"waiting for {job.url} to make an adapter of {model}"):
        trainer = client.trainer(model, plan.optimizer, folder)
        renderer = Renderer(trainer.get_tokenizer(), max_length or served[model].get("max_context_length"))
        kind = make(trainer, renderer, folder)
    name = trainer.get_info().model_id
    console.print(f"the console shows it: {job.url}/console/runs/{quote(name, safe=':')}")

    def tell(step: int, metrics: Mapping[str, float]) -> None:
        finite = {each: value for each, value in metrics.items() if math.isfinite(value)}
        with suppress(Unreachable):  # the SDK waits for the server; its console can do without this step
            server.ask(f"training_runs/{quote(name, safe='')}/metrics", {"step": step, "metrics": finite})

    with _told_to(client, folder), train_output.showing(console, plan.steps, folder.place.step) as show:

        def each(step: int, metrics: Mapping[str, float]) -> None:
            tell(step, metrics)
            show(step, metrics)

        loop.train(trainer, kind, plan, folder, each, client.forget)
    client.close("success")
    console.print(draw_curve(folder.curve(kind.main), name=kind.main))
    _say_how_to_use(console, job, folder.place)


def _capabilities(server: Server) -> Any:
    """Ask the server what it has, and wait for one that is just being started."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while True:
        try:
            return server.ask("get_server_capabilities")
        except Unreachable:
            if time.monotonic() > deadline:
                raise
            time.sleep(1)


@contextmanager
def _told_to(client: "TrainSession", folder: "RunFolder") -> Iterator[None]:
    """Tell the server why a run ends early, and the user in one line."""
    import tinker

    def again() -> str:
        place = "goes on from the last checkpoint" if folder.place.state else "begins it again"
        return f"the same command {place}"

    try:
        yield
    except tinker.TinkerError as problem:
        told = getattr(problem, "body", None)
        reason = told.get("detail", problem) if isinstance(told, dict) else problem
        raise StartError(f"the run ended: {reason}; {again()}") from problem
    except StartError as problem:
        client.close("errored", str(problem))
        raise
    except KeyboardInterrupt:
        client.close("interrupted")
        raise StartError(f"interrupted; {again()}") from None


def _say_how_to_use(console: Any, job: "Job", place: "RunPlace") -> None:
    for line in train_output.how_to_use(job.url, bool(job.api_key), place.final, place.state):
        console.print(line)


def _import_packages() -> None:
    """Import what only clients need, before there is a session to end. Raises StartError if it is missing."""
    for package in PACKAGES:
        if importlib.util.find_spec(package) is None:
            raise StartError(
                f"this needs the package {package}; install it with: pip install 'spmd_tx[train]'"
            )
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")  # the warning advises installing PyTorch
    with ended_by_interrupts():
        for module in SLOW_TO_IMPORT:
            importlib.import_module(module)
