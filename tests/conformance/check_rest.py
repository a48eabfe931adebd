"""Checks of RestClient: listings, checkpoints, sessions; check_admin.py has usage and the audit log."""

import json
import urllib.request

import numpy as np
import pytest
import safetensors.numpy
import tinker
from tinker import types

from tests.conformance.check_training import parameters_of, telemetry_is_accepted
from tests.conformance.registry import TWINS, Standing, covers
from tests.conformance.world import World, settled, twins
from tests.sdk.examples import SECONDS
from tests.sdk.server import BASE_MODEL

DAY = 24 * 3600


def new_state(world: World) -> str:
    return world.trained.save_state(world.new_name()).result(SECONDS).path


def paths(response: types.CheckpointsListResponse) -> list[str]:
    return [each.tinker_path for each in response.checkpoints]


@covers(
    f"RestClient.get_training_run{TWINS}",
    f"RestClient.get_training_run_by_tinker_path{TWINS}",
    does="describes a run: its model, owner, rank and last checkpoints",
    effect="as it was created and saved; a stranger does not find it",
)
def get_training_run(world: World) -> None:
    run_id = world.trained.model_id
    calls = {"get_training_run": run_id, "get_training_run_by_tinker_path": world.state_path}
    for name, argument in calls.items():
        for mine, strangers in zip(twins(world.rest, name), twins(world.stranger_rest, name), strict=True):
            run = mine(argument)
            assert (run.training_run_id, run.base_model, run.is_lora) == (run_id, BASE_MODEL, True)
            assert (run.lora_rank, run.model_owner, run.corrupted) == (4, "owner", False)
            assert run.last_checkpoint.tinker_path.startswith(f"tinker://{run_id}/weights/")
            with pytest.raises(tinker.NotFoundError):
                strangers(argument)


@covers(
    f"RestClient.list_training_runs{TWINS}",
    does="lists the caller's runs, newest first, in pages; all runs of a project",
    effect="pages follow each other without gap; no stranger's run is among them",
)
def list_training_runs(world: World) -> None:
    stranger = settled(world.stranger.create_lora_training_client)(BASE_MODEL, rank=2)
    trained, project = world.trained.model_id, world.new_service(project_id="runs-project")
    in_project = settled(project.create_lora_training_client)(BASE_MODEL, rank=2).model_id
    for method in twins(world.rest, "list_training_runs"):
        everything = method(limit=100)
        ids = [run.training_run_id for run in everything.training_runs]
        assert everything.cursor.total_count == len(ids) == len(set(ids))
        assert [run.training_run_id for run in method(limit=1, offset=1).training_runs] == ids[1:2]
        assert trained in ids
        assert stranger.model_id not in ids
        of_project = method(limit=100, project_id="runs-project").training_runs
        assert [run.training_run_id for run in of_project] == [in_project]
    settled(project.close)("success")


@covers(
    f"RestClient.list_checkpoints{TWINS}",
    does="lists the checkpoints of a run",
    effect="training and sampler checkpoints with sizes; a stranger finds none of it",
)
def list_checkpoints(world: World) -> None:
    kinds = {world.state_path: "training", world.sampler_path: "sampler"}
    run_id = world.trained.model_id
    for mine, strangers in zip(
        twins(world.rest, "list_checkpoints"), twins(world.stranger_rest, "list_checkpoints"), strict=True
    ):
        found = {each.tinker_path: each for each in mine(run_id).checkpoints}
        assert {path: found[path].checkpoint_type for path in kinds} == kinds
        assert all(each.size_bytes > 0 for each in found.values())
        with pytest.raises(tinker.NotFoundError):
            strangers(run_id)


@covers(
    f"RestClient.list_user_checkpoints{TWINS}",
    does="lists the caller's checkpoints of all runs, in pages",
    effect="pages follow each other without gap; a stranger's list has none of them",
)
def list_user_checkpoints(world: World) -> None:
    new_state(world)
    for mine, strangers in zip(
        twins(world.rest, "list_user_checkpoints"),
        twins(world.stranger_rest, "list_user_checkpoints"),
        strict=True,
    ):
        everything = paths(mine(limit=1000))
        assert world.state_path in everything
        assert paths(mine(limit=1, offset=1)) == everything[1:2]
        assert not set(everything) & set(paths(strangers(limit=1000)))


@covers(
    f"RestClient.delete_checkpoint{TWINS}",
    f"RestClient.delete_checkpoint_from_tinker_path{TWINS}",
    does="deletes a checkpoint and its files",
    effect="it is neither listed nor loaded any more; a stranger cannot",
)
def delete_checkpoint(world: World) -> None:
    run_id = world.trained.model_id
    for name in ("delete_checkpoint", "delete_checkpoint_from_tinker_path"):
        for mine, strangers in zip(twins(world.rest, name), twins(world.stranger_rest, name), strict=True):
            path = new_state(world)
            checkpoint_id = path.removeprefix(f"tinker://{run_id}/")
            arguments = (run_id, checkpoint_id) if name == "delete_checkpoint" else (path,)
            with pytest.raises(tinker.NotFoundError):
                strangers(*arguments)
            assert path in paths(settled(world.rest.list_checkpoints)(run_id))
            mine(*arguments)
            assert path not in paths(settled(world.rest.list_checkpoints)(run_id))
            with pytest.raises(tinker.NotFoundError):
                settled(world.service.create_training_client_from_state)(path)


@covers(
    f"RestClient.publish_checkpoint_from_tinker_path{TWINS}",
    f"RestClient.unpublish_checkpoint_from_tinker_path{TWINS}",
    does="lets everybody with a key read a checkpoint, or its owner alone again",
    effect="a stranger can load it while it is public, and not before or after",
)
def publish(world: World) -> None:
    load = settled(world.stranger.create_training_client_from_state)
    for publish, unpublish in zip(
        twins(world.rest, "publish_checkpoint_from_tinker_path"),
        twins(world.rest, "unpublish_checkpoint_from_tinker_path"),
        strict=True,
    ):
        path = new_state(world)
        publish(path)
        assert world.listed(path).public
        np.testing.assert_array_equal(parameters_of(load(path)), parameters_of(world.trained))
        unpublish(path)
        assert not world.listed(path).public
        with pytest.raises(tinker.NotFoundError):
            load(path)


@covers(
    f"RestClient.set_checkpoint_ttl_from_tinker_path{TWINS}",
    does="sets when a checkpoint is deleted, later or earlier; None keeps it",
    effect="the list shows the new expiry, and none after None",
)
def set_checkpoint_ttl(world: World) -> None:
    for method in twins(world.rest, "set_checkpoint_ttl_from_tinker_path"):
        path = new_state(world)
        method(path, DAY)
        first = world.expiry_of(path)
        method(path, 2 * DAY)
        assert (world.expiry_of(path) - first).total_seconds() == pytest.approx(DAY, abs=60)
        method(path, None)
        assert world.listed(path).expires_at is None


@covers(
    "RestClient.get_weights_info_by_tinker_path",
    does="tells from which base model and with which adapter a checkpoint was made",
    effect="as it was created; a stranger does not find it",
)
def get_weights_info(world: World) -> None:
    for path in (world.state_path, world.sampler_path):
        info = settled(world.rest.get_weights_info_by_tinker_path)(path)
        assert (info.base_model, info.is_lora, info.lora_rank) == (BASE_MODEL, True, 4)
        assert (info.train_mlp, info.train_attn, info.train_unembed) == (True, True, True)
        with pytest.raises(tinker.NotFoundError):
            settled(world.stranger_rest.get_weights_info_by_tinker_path)(path)


@covers(
    f"RestClient.copy_weights{TWINS}",
    does="gives a checkpoint a second home in a new session, of the caller and with a project",
    effect="the copy is the same, expires as asked, and belongs to whoever copied a public one",
)
def copy_weights(world: World) -> None:
    for mine, strangers in zip(
        twins(world.rest, "copy_weights"), twins(world.stranger_rest, "copy_weights"), strict=True
    ):
        copy = mine(world.state_path, "copies", ttl_seconds=DAY)
        assert world.listed(copy).expires_at is not None
        trainer = settled(world.service.create_training_client_from_state)(copy)
        np.testing.assert_array_equal(parameters_of(trainer), parameters_of(world.trained))
        with pytest.raises(tinker.NotFoundError):
            strangers(world.state_path, "copies")
        settled(world.rest.publish_checkpoint_from_tinker_path)(copy)
        theirs = strangers(copy, "copies")
        assert theirs in paths(settled(world.stranger_rest.list_user_checkpoints)())
        assert theirs not in paths(settled(world.rest.list_user_checkpoints)(limit=1000))


@covers(
    f"RestClient.get_external_weights_urls{TWINS}",
    does="signs addresses of a checkpoint's files, which need no key for a while",
    effect="they give a PEFT adapter, whole and in ranges; a changed address gives nothing; a stranger gets "
    "none",
)
def get_external_weights_urls(world: World) -> None:
    path = world.trained.save_weights_external(world.new_name()).result(SECONDS).path
    for mine, strangers in zip(
        twins(world.rest, "get_external_weights_urls"),
        twins(world.stranger_rest, "get_external_weights_urls"),
        strict=True,
    ):
        urls = mine(path).urls
        assert json.loads(fetch(urls["adapter_config.json"]))["r"] == 4
        weights = fetch(urls["adapter_model.safetensors"])
        assert safetensors.numpy.load(weights)
        assert fetch(urls["adapter_model.safetensors"], {"Range": "bytes=8-15"}) == weights[8:16]
        with pytest.raises(urllib.request.HTTPError):
            fetch(urls["adapter_config.json"] + "0")
        with pytest.raises(tinker.NotFoundError):
            strangers(path)


def fetch(url: str, headers: dict[str, str] | None = None) -> bytes:
    with urllib.request.urlopen(
        urllib.request.Request(url, headers=headers or {}), timeout=SECONDS
    ) as answer:
        return answer.read()


@covers(
    f"RestClient.get_session{TWINS}",
    does="lists the models and samplers of a session, its metadata and name",
    effect="as they were made; a stranger does not find it",
)
def get_session(world: World) -> None:
    service = world.new_service(user_metadata={"a": "b"}, display_name="a name")
    model_id = settled(service.create_lora_training_client)(BASE_MODEL, rank=2).model_id
    sampler_id = settled(service.create_sampling_client)(base_model=BASE_MODEL)._sampling_session_id
    session_id = model_id.split(":")[0]
    for mine, strangers in zip(
        twins(world.rest, "get_session"), twins(world.stranger_rest, "get_session"), strict=True
    ):
        session = mine(session_id)
        assert (session.training_run_ids, session.sampler_ids) == ([model_id], [sampler_id])
        assert (session.user_metadata, session.display_name) == ({"a": "b"}, "a name")
        with pytest.raises(tinker.NotFoundError):
            strangers(session_id)
    settled(service.close)("success")


@covers(
    f"RestClient.list_sessions{TWINS}",
    does="lists the caller's sessions, newest first, in pages",
    effect="pages follow each other without gap; no stranger's session is among them",
)
def list_sessions(world: World) -> None:
    strangers = settled(world.stranger.create_lora_training_client)(BASE_MODEL, rank=2).model_id.split(":")[0]
    for method in twins(world.rest, "list_sessions"):
        everything = method(limit=1000).sessions
        assert world.trained.model_id.split(":")[0] in everything
        assert strangers not in everything
        assert method(limit=1, offset=1).sessions == everything[1:2]


@covers(
    "RestClient.search_sessions",
    does="finds sessions by name, metadata, project, status and ID, in pages",
    effect="finds the one with this name and metadata and no other; a stranger finds none",
)
def search_sessions(world: World) -> None:
    name = world.new_name()
    model_ids = []
    for number in range(2):
        service = world.new_service(user_metadata={"number": str(number)}, display_name=f"found by {name}")
        model_ids.append(settled(service.create_lora_training_client)(BASE_MODEL, rank=2).model_id)
        settled(service.close)("success")
    search = settled(world.rest.search_sessions)
    both = search(types.SessionSearchRequest(display_name=name)).sessions
    assert [each.display_name for each in both] == [f"found by {name}"] * 2
    request = types.SessionSearchRequest(display_name=name, user_metadata={"number": "1"})
    (found,) = search(request).sessions
    assert found.session_id == model_ids[-1].split(":")[0]
    assert found.checkpoints_count == 0
    page = search(types.SessionSearchRequest(display_name=name, limit=1))
    rest = types.SessionSearchRequest(display_name=name, limit=1, cursor=page.next_cursor)
    assert [each.session_id for each in (*page.sessions, *search(rest).sessions)] == [
        each.session_id for each in both
    ]
    assert settled(world.stranger_rest.search_sessions)(request).sessions == []


@covers(
    f"RestClient.assign_session_project{TWINS}",
    does="labels a session with a project",
    effect="the runs of the project are those of the session; a stranger cannot",
)
def assign_session_project(world: World) -> None:
    service = world.new_service()
    model_id = settled(service.create_lora_training_client)(BASE_MODEL, rank=2).model_id
    session_id = model_id.split(":")[0]
    for mine, strangers in zip(
        twins(world.rest, "assign_session_project"),
        twins(world.stranger_rest, "assign_session_project"),
        strict=True,
    ):
        project = world.new_name()
        mine(session_id, project)
        runs = settled(world.rest.list_training_runs)(project_id=project).training_runs
        assert [run.training_run_id for run in runs] == [model_id]
        with pytest.raises(tinker.NotFoundError):
            strangers(session_id, project)
    settled(service.close)("success")


@covers(
    f"RestClient.export_session_trace{TWINS}",
    does="writes the session's requests as a Perfetto trace, at a signed address",
    effect="the trace has the session's requests; a stranger gets none",
)
def export_session_trace(world: World) -> None:
    session_id = world.trained.model_id.split(":")[0]
    for mine, strangers in zip(
        twins(world.rest, "export_session_trace"),
        twins(world.stranger_rest, "export_session_trace"),
        strict=True,
    ):
        trace = fetch(mine(session_id))
        assert b"forward_backward" in trace
        assert b"optim_step" in trace
        with pytest.raises(tinker.NotFoundError):
            strangers(session_id)


@covers(
    f"RestClient.get_sampler{TWINS}",
    does="says what a sampler samples from",
    effect="the checkpoint's path and the base model; a stranger does not find it",
)
def get_sampler(world: World) -> None:
    opened = settled(world.service.create_sampling_client)(model_path=world.sampler_path)
    sampler_id = opened._sampling_session_id
    for mine, strangers in zip(
        twins(world.rest, "get_sampler"), twins(world.stranger_rest, "get_sampler"), strict=True
    ):
        sampler = mine(sampler_id)
        assert (sampler.sampler_id, sampler.base_model) == (sampler_id, BASE_MODEL)
        assert sampler.model_path == world.sampler_path
        with pytest.raises(tinker.NotFoundError):
            strangers(sampler_id)


@covers(
    "RestClient.get_server_capabilities",
    does="lists the models of this server",
    effect="it is the one that is served",
)
def get_server_capabilities(world: World) -> None:
    (model,) = settled(world.rest.get_server_capabilities)().supported_models
    assert model.model_name == BASE_MODEL


@covers(
    "RestClient.whoami",
    does="the SDK reads it out of a token that only the hosted service signs; keys here are no such tokens. "
    "`tinker auth login` and `GET /api/v1/auth/apikey/me` tell whose a key is",
    effect="RuntimeError: whoami needs JWT auth",
    standing=Standing.CANNOT_APPLY,
)
def whoami(world: World) -> None:
    with pytest.raises(RuntimeError, match=r"(?i)jwt"):
        settled(world.rest.whoami)()


@covers(
    "RestClient.get_telemetry",
    does="takes the SDK's telemetry, and drops it",
    effect="what is logged and flushed is accepted",
)
def get_telemetry(world: World) -> None:
    telemetry_is_accepted(world.rest)
