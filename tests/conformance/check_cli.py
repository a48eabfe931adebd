"""Checks of the `tinker` command: each subcommand against the server, with the effect that it has there."""

import json
import tempfile
from datetime import UTC, datetime, timedelta
from importlib.metadata import version as installed
from pathlib import Path
from typing import Any

import pytest
import safetensors.numpy
from click.testing import CliRunner
from tinker.cli.__main__ import main_cli

from tests.conformance.check_rest import fetch, new_state, paths
from tests.conformance.registry import Standing, covers
from tests.conformance.world import World, settled
from tests.sdk.server import BASE_MODEL
from tests.support.hub import Hub, serving
from tests.support.sdk_process import run_tinker, run_tinker_anew


def run(world: World, *arguments: str, stdin: str | None = None, **more: str | None) -> str:
    """What `tinker ARGUMENTS` prints. Raises what makes it fail."""
    runner = CliRunner(env=environment_of(world) | more)
    result = runner.invoke(main_cli, list(arguments), input=stdin, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


def environment_of(world: World, key: str | None = None) -> dict[str, str]:
    return {"TINKER_BASE_URL": world.server.url, "TINKER_API_KEY": key or world.key}


def as_json(world: World, *arguments: str) -> Any:
    return json.loads(run(world, "--format", "json", *arguments))


@covers(
    "tinker version",
    does="the SDK prints its version",
    effect="it is the installed one",
    standing=Standing.LOCAL,
)
def version(world: World) -> None:
    assert installed("tinker") in run(world, "version")


@covers(
    "tinker run list",
    does="lists the caller's runs",
    effect="all of them, and none of a stranger's",
)
def run_list(world: World) -> None:
    run_id = world.trained.model_id
    listed = as_json(world, "run", "list", "--limit", "0")["runs"]
    assert run_id in {each["training_run_id"] for each in listed}
    assert len(listed) == settled(world.rest.list_training_runs)(limit=1).cursor.total_count
    theirs = run_tinker("--format", "json", "run", "list", **environment_of(world, world.stranger_key))
    assert run_id not in theirs


@covers(
    "tinker run info",
    does="describes a run",
    effect="base model and rank as created",
)
def run_info(world: World) -> None:
    found = json.dumps(as_json(world, "run", "info", world.trained.model_id))
    assert f'"{BASE_MODEL}"' in found
    assert '"lora_rank": 4' in found


@covers(
    "tinker checkpoint list",
    does="lists the checkpoints of a run, or all of the caller's",
    effect="those of the SDK's list; none of a stranger's",
)
def checkpoint_list(world: World) -> None:
    run_id = world.trained.model_id
    assert world.state_path
    for arguments, expected in {
        ("--run-id", run_id): settled(world.rest.list_checkpoints)(run_id),
        ("--limit", "0"): settled(world.rest.list_user_checkpoints)(limit=1000),
    }.items():
        listed = as_json(world, "checkpoint", "list", *arguments)["checkpoints"]
        assert {each["tinker_path"] for each in listed} == set(paths(expected))
    theirs = run_tinker("--format", "json", "checkpoint", "list", **environment_of(world, world.stranger_key))
    assert world.state_path not in theirs


@covers("tinker checkpoint info", does="describes a checkpoint", effect="its type, size and base model")
def checkpoint_info(world: World) -> None:
    found = json.dumps(as_json(world, "checkpoint", "info", world.state_path))
    assert world.state_path in found
    assert '"training"' in found


@covers(
    "tinker checkpoint publish",
    "tinker checkpoint unpublish",
    does="lets everybody with a key read a checkpoint, or its owner alone again",
    effect="the list shows it",
)
def checkpoint_publish(world: World) -> None:
    path = new_state(world)
    run(world, "checkpoint", "publish", path)
    assert world.listed(path).public
    run(world, "checkpoint", "unpublish", path)
    assert not world.listed(path).public


@covers(
    "tinker checkpoint set-ttl",
    does="sets when a checkpoint is deleted, or keeps it",
    effect="the list shows the expiry, and none after --remove",
)
def checkpoint_set_ttl(world: World) -> None:
    path = new_state(world)
    run(world, "checkpoint", "set-ttl", path, "--ttl", "7200")
    left = world.expiry_of(path) - datetime.now(UTC)
    assert timedelta(hours=1.9) < left < timedelta(hours=2.1)
    run(world, "checkpoint", "set-ttl", path, "--remove")
    assert world.listed(path).expires_at is None


@covers(
    "tinker checkpoint delete",
    does="deletes checkpoints, one by one or those of a run",
    effect="they are not listed any more",
)
def checkpoint_delete(world: World) -> None:
    gone, kept = new_state(world), new_state(world)
    run(world, "checkpoint", "delete", gone, "--yes")
    listed = paths(settled(world.rest.list_checkpoints)(world.trained.model_id))
    assert gone not in listed
    assert kept in listed


@covers(
    "tinker checkpoint download",
    does="exports a checkpoint as a PEFT folder, and hands its files out at signed addresses",
    effect="a folder with an adapter of the model's rank; the temporary export is gone",
)
def checkpoint_download(world: World) -> None:
    with tempfile.TemporaryDirectory() as folder:
        run(world, "--format", "json", "checkpoint", "download", world.state_path, "--output", folder)
        (target,) = Path(folder).iterdir()
        assert json.loads((target / "adapter_config.json").read_text())["r"] == 4
        assert safetensors.numpy.load_file(target / "adapter_model.safetensors")
    listed = settled(world.rest.list_user_checkpoints)(limit=1000)
    assert not [path for path in paths(listed) if path.endswith("/external_weights/download")]


@covers(
    "tinker checkpoint push-hf",
    does="the same, and uploads the folder to the Hugging Face Hub",
    effect="a hub on loopback gets adapter, configuration and model card",
)
def checkpoint_push_hf(world: World) -> None:
    hub = Hub("hf_x")
    with serving(hub), tempfile.TemporaryDirectory() as home:
        place = {"HF_ENDPOINT": hub.url, "HF_HOME": home, "HF_HUB_OFFLINE": "0"}
        own_hub = place | {"HF_TOKEN": hub.token, "HF_HUB_DISABLE_XET": "1"}
        push = ("checkpoint", "push-hf", world.state_path, "--repo", "alice/adapter")
        run_tinker_anew(*push, **environment_of(world), **own_hub)
    files = hub.files["alice/adapter"]
    assert {"adapter_config.json", "adapter_model.safetensors", "README.md"} <= files.keys()
    assert safetensors.numpy.load(files["adapter_model.safetensors"])
    assert world.state_path in files["README.md"].decode()


@covers("tinker model list", does="lists the models of this server", effect="it is the one that is served")
def model_list(world: World) -> None:
    assert f'"{BASE_MODEL}"' in json.dumps(as_json(world, "model", "list", BASE_MODEL.upper()))


@covers(
    "tinker session export-trace",
    does="writes the session's requests as a Perfetto trace",
    effect="the downloaded file is the one at the printed address",
)
def session_export_trace(world: World) -> None:
    session_id = world.trained.model_id.split(":")[0]
    url = run(world, "session", "export-trace", session_id, "--url-only").strip()
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / "own.pftrace"
        run(world, "session", "export-trace", session_id, "--output", str(target))
        assert b"optim_step" in target.read_bytes()
        assert b"optim_step" in fetch(url)


@covers(
    "tinker billing usage",
    does="prints tokens and storage by hour and session",
    effect="the session that trained is in it",
)
def billing_usage(world: World) -> None:
    session_id = world.trained.model_id.split(":")[0]
    now = datetime.now(UTC).replace(minute=0, second=0, microsecond=0)
    start, end = [(now + timedelta(hours=hours)).strftime("%Y-%m-%dT%H:00:00Z") for hours in (-1, 1)]
    usage = as_json(world, "billing", "usage", start, end)
    assert session_id in json.dumps(usage)


@covers(
    "tinker billing checkpoint-storage",
    does="prints number and bytes of the checkpoints that are kept",
    effect="as many as are listed",
)
def billing_checkpoint_storage(world: World) -> None:
    kept = settled(world.rest.list_user_checkpoints)(limit=1000).checkpoints
    items = as_json(world, "billing", "checkpoint-storage")["data"]
    assert sum(item["checkpoint_count"] for item in items) == len(kept)
    assert sum(item["size_bytes"] for item in items) == sum(each.size_bytes for each in kept)


@covers(
    "tinker auth login",
    "tinker auth logout",
    does="tells whose a key is, whereupon the SDK stores it; logout removes it again",
    effect="the stored key is used without TINKER_API_KEY; a wrong one is refused; logout leaves none",
)
def auth_login(world: World) -> None:
    with tempfile.TemporaryDirectory() as home:
        without_key = {"HOME": home, "TINKER_API_KEY": None}
        with pytest.raises(Exception, match="Could not validate"):
            run(world, "auth", "login", stdin="tml-wrong\n", **without_key)
        assert "Logged in as owner (spmd_tx)" in run(world, "auth", "login", stdin=world.key, **without_key)
        assert "Tinker accessible: yes" in run(world, "auth", "status", **without_key)
        assert "Removed credential 'owner " in run(world, "auth", "logout", **without_key)
        with pytest.raises(Exception, match="No Tinker credentials"):
            run(world, "auth", "status", **without_key)


@covers(
    "tinker auth status",
    does="says whether a key is there, and whether the server takes it",
    effect="yes with a key, no with a wrong one",
)
def auth_status(world: World) -> None:
    assert "Tinker accessible: yes" in run(world, "auth", "status")
    with pytest.raises(Exception, match="Authentication failed"):
        run(world, "auth", "status", TINKER_API_KEY="tml-wrong")


@covers(
    "tinker auth whoami",
    does="the SDK reads it out of a token that only the hosted service signs; `tinker auth login` tells "
    "whose a key is",
    effect="it fails: whoami needs JWT auth",
    standing=Standing.CANNOT_APPLY,
)
def auth_whoami(world: World) -> None:
    with pytest.raises(Exception, match=r"(?i)jwt"):
        run(world, "auth", "whoami")
