"""Open a session, find it again, and show its timeline, its usage and its entries in the audit log."""

import argparse
import urllib.request
import warnings
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import tinker
from tinker import types

LINE = "Berlin is the capital of Germany."


def main() -> None:
    options = parse_options()
    # RestClient and AdminClient need no session.
    rest, admin = tinker.RestClient(base_url=options.base_url), tinker.AdminClient(base_url=options.base_url)
    session_id = work(options)

    with warnings.catch_warnings(action="ignore", category=tinker.ExperimentalWarning):
        wanted = types.SessionSearchRequest(display_name="first steps", user_metadata={"team": "geography"})
        (found, *_) = rest.search_sessions(wanted).result().sessions
    assert isinstance(found.status, types.ClientSessionFinished)
    print(f"found {found.session_id}: {found.status.type}, {found.status.reason.type}, {found.project_id}")

    url = rest.export_session_trace(session_id).result()  # good for an hour
    urllib.request.urlretrieve(url, options.trace)
    print(f"trace of {options.trace.stat().st_size} bytes in {options.trace}; open it in ui.perfetto.dev")

    hour = datetime.now(UTC).replace(minute=0, second=0, microsecond=0)
    usage = admin.get_billing_usage(hour - timedelta(hours=1), hour + timedelta(hours=1)).result()
    for event in usage.data:
        amount = getattr(event.event_info, "token_count", None)
        if event.session_id == session_id and amount is not None:
            print(f"used {event.event_info.type}: {amount} tokens, {event.estimated_cost_usd} dollars")

    for entry in admin.get_audit_log().result().entries:
        if entry.event_details.get("session_id") == session_id:
            print(f"{entry.timestamp:%H:%M:%S} {entry.event} by {entry.event_details['actor']}")


def work(options: argparse.Namespace) -> str:
    """Train a little, save, sample, and end the session."""
    service = tinker.ServiceClient(
        base_url=options.base_url,
        display_name="First steps",
        project_id="capitals",
        user_metadata={"team": "geography"},
    )
    with service:
        trainer = service.create_lora_training_client(options.base_model, rank=4).result()
        tokens = trainer.get_tokenizer().encode(LINE)
        prompt = types.ModelInput.from_ints(tokens[:-1])
        inputs: dict[str, Any] = {"target_tokens": tokens[1:], "weights": [1.0] * (len(tokens) - 1)}
        datum = types.Datum(model_input=prompt, loss_fn_inputs=inputs)
        trainer.forward_backward([datum], "cross_entropy").result()
        trainer.optim_step(types.AdamParams(learning_rate=1e-3)).result()
        trainer.save_state("first").result()
        sampler = trainer.save_weights_and_get_sampling_client().result()
        sampler.sample(prompt, 2, types.SamplingParams(max_tokens=8)).result()
    return trainer.get_info().model_id.partition(":")[0]


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--base-url", help="address of the server; default: $TINKER_BASE_URL")
    parser.add_argument("--base-model", default="Qwen/Qwen3-0.6B")
    parser.add_argument("--trace", type=Path, default=Path("first-steps.pftrace"))
    return parser.parse_args()


if __name__ == "__main__":
    main()
