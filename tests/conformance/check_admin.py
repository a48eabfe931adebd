"""Checks of usage, storage and the audit log, which AdminClient and RestClient both have."""

from datetime import UTC, datetime, timedelta

from tests.conformance.check_training import telemetry_is_accepted
from tests.conformance.registry import TWINS, covers
from tests.conformance.world import DATA, World, settled, twins
from tests.sdk.examples import drawn, prompt, train
from tests.sdk.server import BASE_MODEL

HOUR = timedelta(hours=1)
ADMINS = ("admin", "rest")  # of a World


@covers(
    f"AdminClient.get_billing_usage{TWINS}",
    f"RestClient.get_billing_usage{TWINS}",
    does="tokens trained, prefilled and sampled, checkpoints and storage, by hour, session and key; cost 0",
    effect="the tokens of a session are those that it was sent; a stranger sees none of them",
)
def get_billing_usage(world: World) -> None:
    service = world.new_service(user_metadata={"used": "yes"})
    trainer = settled(service.create_lora_training_client)(BASE_MODEL, rank=2)
    train(trainer, DATA)
    sampler = settled(service.create_sampling_client)(base_model=BASE_MODEL)
    settled(sampler.sample)(prompt([1, 2, 3]), 2, drawn(max_tokens=4))
    session_id = trainer.model_id.split(":")[0]
    settled(service.close)("success")
    start = datetime.now(UTC).replace(minute=0, second=0, microsecond=0)
    for client in ADMINS:
        for method in twins(getattr(world, client), "get_billing_usage"):
            usage = method(start - HOUR, start + HOUR)
            events = [each for each in usage.data if each.session_id == session_id]
            counts = {event.event_info.type: 0 for event in events}
            for event in events:
                counts[event.event_info.type] += getattr(event.event_info, "token_count", 0)
                assert event.estimated_cost_usd in (0, None)
            assert counts["training"] == sum(datum.model_input.length for datum in DATA)
            assert counts["sampling_sample"] == 8
            assert usage.sessions[session_id].user_metadata == {"used": "yes"}
    strangers = settled(world.stranger_rest.get_billing_usage)(start - HOUR, start + HOUR)
    assert session_id not in strangers.sessions


@covers(
    f"AdminClient.get_current_checkpoint_storage_usage{TWINS}",
    f"RestClient.get_current_checkpoint_storage_usage{TWINS}",
    does="bytes and number of the checkpoints that are kept, by owner and project",
    effect="as many as are listed, of their sizes; a stranger sees their own only",
)
def get_current_checkpoint_storage_usage(world: World) -> None:
    assert world.state_path
    listed = settled(world.rest.list_user_checkpoints)(limit=1000).checkpoints
    for client in ADMINS:
        for method in twins(getattr(world, client), "get_current_checkpoint_storage_usage"):
            items = method().data
            assert sum(item.checkpoint_count for item in items) == len(listed)
            assert sum(item.size_bytes for item in items) == sum(each.size_bytes for each in listed)
    strangers = settled(world.stranger_rest.list_user_checkpoints)(limit=1000).checkpoints
    theirs = settled(world.stranger_rest.get_current_checkpoint_storage_usage)().data
    assert sum(item.checkpoint_count for item in theirs) == len(strangers)


@covers(
    f"AdminClient.get_audit_log{TWINS}",
    f"RestClient.get_audit_log{TWINS}",
    does="who has saved, loaded, published and deleted what, and when",
    effect="a checkpoint's life is in it, of today and not of another day; a stranger sees none of it",
)
def get_audit_log(world: World) -> None:
    path = world.trained.save_state(world.new_name()).result().path
    settled(world.rest.delete_checkpoint_from_tinker_path)(path)
    today = datetime.now(UTC).date()
    for client in ADMINS:
        for method in twins(getattr(world, client), "get_audit_log"):
            events = [entry for entry in method("checkpoints").entries if entry.tinker_path == path]
            assert len(events) >= 2
            assert {entry.timestamp.date() for entry in events} <= {today, today - timedelta(days=1)}
            assert path not in {
                entry.tinker_path for entry in method("all", day=today - timedelta(days=5)).entries
            }
    strangers = settled(world.stranger_rest.get_audit_log)("all").entries
    assert path not in {entry.tinker_path for entry in strangers}


@covers(
    "AdminClient.get_telemetry",
    does="takes the SDK's telemetry, and drops it",
    effect="what is logged and flushed is accepted",
)
def get_telemetry(world: World) -> None:
    telemetry_is_accepted(world.admin)
