"""Data directories that an earlier version has written: what was done there, and what is done after.

The first client ends its session; the second one is in the middle of its work when the server is killed. A
database of PostgreSQL lies beside the files as a dump.
"""

import json
import subprocess
import tarfile
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import tinker
import zstandard
from tinker import types

from spmd_tx.coordinator.wire import tinker_pb2 as pb
from spmd_tx.demo.tiny_model import Spec
from tests.sdk.examples import SECONDS, batch, drawn, logprobs_of, random_tokens, sample, train
from tests.sdk.raw_api import RawApi
from tests.sdk.server import BASE_MODEL

HERE = Path(__file__).parent
SPEC = Spec(n_layers=1, d_model=32, n_heads=4, n_kv_heads=2, d_ff=48, vocab_size=512, max_positions=512)
KINDS: dict[str, dict[str, Any]] = {  # with the options of their servers
    "adapters": {"max_lora_adapters": 4, "snapshot_seconds": 0},
    "whole_weights": {"full_parameters": True, "snapshot_seconds": 0},
}
DATABASES = ("sqlite", "postgresql")
WRITTEN = [(kind, database) for database in DATABASES for kind in KINDS]
RANKS = {"adapters": 4, "whole_weights": 0}
ADAM = types.AdamParams(learning_rate=3e-3, weight_decay=0.01, grad_clip_norm=1.0)
PROMPT, QUESTION = random_tokens(12, seed=5), batch(seed=9)
EXPECTED = "expected.json"
DUMP = "database.sql"

Results = dict[str, Any]


def archive(kind: str, database: str) -> Path:
    return HERE / f"data_{kind}{'' if database == 'sqlite' else f'_{database}'}.tar.zst"


def dump(postgres: Any, database: str, data_dir: Path) -> None:
    """Write a database beside the files, as any newer PostgreSQL reads it."""
    subprocess.run(
        [
            Path(postgres.bin_path) / "pg_dump",
            "--no-owner",
            f"--file={data_dir / DUMP}",
            postgres.get_uri(database=database),
        ],
        check=True,
    )


def restore(postgres: Any, database: str, data_dir: Path) -> str:
    """Make a database of a dump, and return its URL."""
    postgres.psql(f"CREATE DATABASE {database};")
    url = postgres.get_uri(database=database)
    psql = Path(postgres.bin_path) / "psql"
    subprocess.run(
        [psql, "--quiet", "--set=ON_ERROR_STOP=1", f"--file={data_dir / DUMP}", url],
        check=True,
        stdout=subprocess.DEVNULL,
    )
    return url


def pack(place: Path, data_dir: Path, expected: Results) -> None:
    """Keep the directory without compiled programs, and what is expected of servers that go on with it."""
    (data_dir / EXPECTED).write_text(json.dumps(expected))
    memory = BytesIO()
    with tarfile.open(fileobj=memory, mode="w") as tar:
        tar.add(data_dir, "", filter=lambda each: None if each.name == "compilation_cache" else each)
    place.write_bytes(zstandard.ZstdCompressor(level=19).compress(memory.getvalue()))


def unpack(place: Path, data_dir: Path) -> Results:
    """Return what is expected of it."""
    content = zstandard.ZstdDecompressor().decompress(place.read_bytes(), max_output_size=1 << 26)
    with tarfile.open(fileobj=BytesIO(content)) as tar:
        tar.extractall(data_dir, filter="data")
    return json.loads((data_dir / EXPECTED).read_text())


def begin(kind: str, url: str) -> Results:
    """Train one run that is saved, and one that lives in the log alone."""
    with tinker.ServiceClient(base_url=url, api_key="tml-test") as service:
        trainer = service.create_lora_training_client(BASE_MODEL, rank=RANKS[kind], seed=1).result(SECONDS)
        train(trainer, batch(seed=0), adam=ADAM)
        state = trainer.save_state("kept").result(SECONDS).path
        sampler = trainer.save_weights_for_sampler("sampled").result(SECONDS).path
    api = RawApi(url, BASE_MODEL)
    run = api.create_model(0, rank=RANKS[kind])
    for seed in range(3):
        step(api, run, 1 + 2 * seed, seed)
    return {"run": run, "state": state, "sampler": sampler}


def go_on(url: str, run: str, state: str, sampler: str) -> Results:
    """Train both further, and sample from what was saved."""
    api = RawApi(url, BASE_MODEL)
    results: Results = {"rebuilt": api.logprobs(run, 7, QUESTION), "step": step(api, run, 8, seed=3)}
    results["trained"] = api.logprobs(run, 10, QUESTION)
    api.post(f"sessions/{run.partition(':')[0]}/finish", reason={"type": "success"}, detail=None)
    with tinker.ServiceClient(base_url=url, api_key="tml-test") as service:
        trainer = service.create_training_client_from_state_with_optimizer(state).result(SECONDS)
        results["loaded"] = logprobs_of(trainer, QUESTION)
        train(trainer, batch(seed=1), adam=ADAM)
        results["loaded and trained"] = logprobs_of(trainer, QUESTION)
        for name, path in {"base": None, "saved": sampler}.items():
            base_model = BASE_MODEL if path is None else None
            client = service.create_sampling_client(path, base_model).result(SECONDS)
            sequence = sample(client, PROMPT, drawn(20))
            results[f"tokens of {name}"] = sequence.tokens
            results[f"logprobs of {name}"] = sequence.logprobs
    return {name: np.asarray(values).tolist() for name, values in results.items()}


def step(api: RawApi, run: str, number: int, seed: int) -> np.ndarray:
    """Take one step with two requests; return the log-probabilities before it."""
    gradient = api.forward_backward(run, number, batch(seed=seed))
    update = api.optim_step(run, number + 1, learning_rate=3e-3)
    output = pb.ForwardBackwardOutput.FromString(api.retrieve(gradient).raise_for_status().content)
    api.retrieve(update).raise_for_status()
    return np.frombuffer(output.loss_fn_outputs[0].fields["logprobs"].data, "<f4")
