"""A client's trace, from its header to the spans of the workers."""

import time

import tinker

from tests.sdk.examples import ADAM_STEP, SECONDS, batch, drawn, prompt, random_tokens
from tests.sdk.server import BASE_MODEL, Server
from tests.support.otel_collector import Collector, values

TRACE, PARENT = "7c1f92f3577b34da6a3ce929d0e0e473", "11f067aa0ba902b7"


def test_a_trace_reaches_from_the_client_to_the_workers(server: Server, collector: Collector) -> None:
    client = tinker.ServiceClient(
        base_url=server.url,
        api_key="tml-test",
        default_headers_overrides={"traceparent": f"00-{TRACE}-{PARENT}-01"},
    )
    trainer = client.create_lora_training_client(BASE_MODEL, rank=4).result(SECONDS)
    trainer.forward_backward(batch(1), "cross_entropy").result(SECONDS)
    trainer.optim_step(ADAM_STEP).result(SECONDS)
    sampler = trainer.save_weights_and_get_sampling_client().result(SECONDS)
    sampler.sample(prompt(random_tokens(10, 1)), 1, drawn(40)).result(SECONDS)

    deadline = time.monotonic() + SECONDS
    while not (_by_workers(collector.spans) >= {"create_adapter", "prefill", "decode"}):
        assert time.monotonic() < deadline, [span.name for span in collector.spans]
        time.sleep(0.1)
    spans = collector.spans
    assert {span.trace_id.hex() for span in spans} == {TRACE}
    requests = {span.span_id: span for span in spans if span.parent_span_id.hex() == PARENT}
    by_workers = [span for span in spans if "spmd_tx.process" in values(span.attributes)]
    kinds = {(requests[span.parent_span_id].name, span.name) for span in by_workers}
    assert kinds >= {
        ("create_model", "create_adapter"),
        ("forward_backward", "forward_backward"),
        ("optim_step", "optim_step"),
        ("sample", "prefill"),
        ("sample", "decode"),
    }
    for span in by_workers:
        request, told = requests[span.parent_span_id], values(span.attributes)
        assert request.start_time_unix_nano < span.start_time_unix_nano < span.end_time_unix_nano
        busy = round(told["spmd_tx.busy_seconds"] * 1e9)
        assert 0 < busy <= span.end_time_unix_nano - span.start_time_unix_nano
    decodes = [values(span.attributes)["spmd_tx.commands"] for span in by_workers if span.name == "decode"]
    assert len(decodes) < sum(decodes)  # 40 tokens take more than one


def _by_workers(spans: list) -> set[str]:
    return {span.name for span in spans if "spmd_tx.process" in values(span.attributes)}
