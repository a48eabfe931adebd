"""All routes of the application, and a request for each that is complete but for the ids in it."""

from collections.abc import Callable
from dataclasses import dataclass

import httpx
from litestar import Litestar
from litestar.routes import HTTPRoute

from spmd_tx.coordinator.wire import tinker_pb2 as pb

BASE_MODEL = "Qwen/Qwen3-0.6B"


@dataclass(frozen=True)
class Ids:
    """Names of one session and of what hangs on it, whether they exist or not."""

    session: str
    request: str
    name: str = "ck"  # of its checkpoints
    upload: str = "00000000-0000-4000-8000-000000000000"
    trajectory: str = "trj_000000000000000000000000"

    @property
    def model(self) -> str:
        return f"{self.session}:train:0"

    @property
    def sampler(self) -> str:
        return f"{self.session}:sample:0"

    def path(self, kind: str) -> str:
        return f"tinker://{self.model}/{kind}/{self.name}"


Body = Callable[[Ids, Ids], object]  # of the ids in question, and of the sender's own

CHECKPOINT = "/api/v1/training_runs/{run_id}/checkpoints/{kind}/{name}"
USAGE = "/api/v1/billing/usage/events"
TTL, PUBLISH, BEST = (f"{CHECKPOINT}/{name}" for name in ("ttl", "publish", "best"))
CUSTOM_LOSS = [
    {"op": "placeholder", "name": "logprobs", "target": "logprobs"},
    {"op": "call_method", "name": "total", "target": "sum", "args": [{"ref": "logprobs"}]},
    {
        "op": "output",
        "name": "output",
        "target": "output",
        "args": [{"tuple": [{"ref": "total"}, {"dict": {}}]}],
    },
]
FINISH = {"reason": {"type": "success"}, "detail": None}


def _forward_backward(ids: Ids, _: Ids) -> bytes:
    chunk = pb.Chunk(encoded_text=pb.EncodedTextChunk(tokens=bytes(12)))
    datum = pb.Datum(model_input=[chunk])
    return pb.ForwardBackwardRequest(
        model_id=ids.model, seq_id=11, data=[datum], loss_fn="cross_entropy"
    ).SerializeToString()


def _create_model(ids: Ids, _: Ids) -> object:
    lora = {"rank": 8}
    return {"session_id": ids.session, "model_seq_id": 7, "base_model": BASE_MODEL, "lora_config": lora}


def sample(ids: Ids, seq_id: int = 12) -> dict[str, object]:
    return {
        "num_samples": 1,
        "prompt": {"chunks": [{"tokens": [1, 2, 3], "type": "encoded_text"}]},
        "sampling_params": {"max_tokens": 4},
        "sampling_session_id": ids.sampler,
        "seq_id": seq_id,
    }


def _sampler_of_model(session: Ids, path: str | None) -> object:
    base_model = None if path else BASE_MODEL
    return {
        "session_id": session.session,
        "sampling_session_seq_id": 18 if path else 8,
        "base_model": base_model,
        "model_path": path,
    }


def _load(session: Ids, path: str, seq_id: int) -> object:
    return {"session_id": session.session, "model_seq_id": seq_id, "path": path, "optimizer": True}


def _counted(ids: Ids) -> dict[str, object]:
    return {"model": ids.path("sampler_weights"), "messages": [{"role": "user", "content": "a"}]}


# Every way in which a route can be given an id. Several bodies: the id stands in different places.
WITH_IDS: dict[tuple[str, str], list[Body]] = {
    ("POST", "/api/v1/session_heartbeat"): [lambda ids, _: {"session_id": ids.session}],
    ("GET", "/api/v1/sessions/{session_id}"): [lambda *_: None],
    ("PUT", "/api/v1/sessions/{session_id}/project"): [lambda *_: {"project_id": "p"}],
    ("GET", "/api/v1/sessions/{session_id}/trace_export"): [lambda *_: None],
    ("POST", "/api/v1/create_model"): [_create_model],
    ("POST", "/api/v1/get_info"): [lambda ids, _: {"model_id": ids.model}],
    ("GET", "/api/v1/training_runs/{run_id}"): [lambda *_: None],
    ("POST", "/api/v1/forward_backward"): [_forward_backward],
    ("POST", "/api/v1/forward"): [
        lambda ids, _: {
            "model_id": ids.model,
            "seq_id": 17,
            "forward_input": {"data": [], "loss_fn": "cross_entropy"},
        }
    ],
    ("POST", "/api/v1/create_custom_loss"): [
        lambda ids, _: {
            "session_id": ids.session,
            "custom_loss_seq_id": 0,
            "name": "loss",
            "inputs": [{"name": "logprobs", "rank": 1}],
            "graph": {"nodes": CUSTOM_LOSS},
        }
    ],
    ("POST", "/api/v1/optim_step"): [
        lambda ids, _: {"model_id": ids.model, "seq_id": 13, "adam_params": {"learning_rate": 1e-4}}
    ],
    ("POST", "/api/v1/create_sampling_session"): [
        lambda ids, _: _sampler_of_model(ids, None),
        lambda ids, own: _sampler_of_model(own, ids.path("sampler_weights")),
    ],
    ("GET", "/api/v1/samplers/{sampler_id}"): [lambda *_: None],
    ("POST", "/api/v1/asample"): [lambda ids, _: sample(ids)],
    ("POST", "/api/v1/save_weights"): [
        lambda ids, _: {"model_id": ids.model, "path": "new", "seq_id": 14},
    ],
    ("POST", "/api/v1/save_weights_for_sampler"): [
        lambda ids, _: {"model_id": ids.model, "path": "new", "seq_id": 15},
    ],
    ("POST", "/api/v1/save_weights_external"): [
        lambda ids, _: {"model_id": ids.model, "path": "new", "seq_id": 18},
    ],
    ("POST", "/api/v1/copy_weights"): [
        lambda ids, _: {"source_path": ids.path("weights"), "destination_project_id": "p"},
        lambda ids, own: {
            "source_path": own.path("weights"),
            "session_id": ids.session,
            "model_seq_id": 10,
        },
        lambda ids, own: {
            "source_path": ids.path("sampler_weights"),
            "session_id": own.session,
            "model_seq_id": 11,
        },
    ],
    ("POST", "/api/v1/external_weights_upload_finish"): [lambda ids, _: {"upload_id": ids.upload}],
    ("POST", "/api/v1/load_weights"): [
        lambda ids, own: {"model_id": ids.model, "seq_id": 16, "path": own.path("weights")},
        lambda ids, own: _load(ids, own.path("weights"), 9),
        lambda ids, own: _load(own, ids.path("weights"), 19),
    ],
    ("POST", "/api/v1/weights_info"): [
        lambda ids, _: {"tinker_path": ids.path("weights")},
        lambda ids, _: {"tinker_path": ids.path("sampler_weights")},
        lambda ids, _: {"tinker_path": ids.path("external_weights")},
    ],
    ("GET", "/api/v1/training_runs/{run_id}/checkpoints"): [lambda *_: None],
    ("GET", "/api/v1/training_runs/{run_id}/metrics"): [lambda *_: None],
    ("POST", "/api/v1/training_runs/{run_id}/metrics"): [lambda *_: {"metrics": {"reward": 1.0}}],
    ("GET", "/console/api/runs/{run_id}"): [lambda *_: None],
    ("PATCH", "/console/api/runs/{run_id}"): [lambda *_: {"name": "a", "group": "b", "archived": True}],
    ("GET", "/console/api/runs/{run_id}/metrics"): [lambda *_: None],
    ("GET", "/console/api/runs/{run_id}/curves"): [lambda *_: None],
    ("GET", "/console/api/runs/{run_id}/timing"): [lambda *_: None],
    ("GET", "/console/api/runs/{run_id}/samples"): [lambda *_: None],
    ("GET", "/console/api/runs/{run_id}/samples/{request_id}"): [lambda *_: None],
    ("GET", "/console/api/runs/{run_id}/samples/{request_id}/images/{number}"): [lambda *_: None],
    ("PUT", TTL): [lambda *_: {"ttl_seconds": 3600}, lambda *_: {"ttl_seconds": 0}],
    ("POST", PUBLISH): [lambda *_: None],
    ("DELETE", PUBLISH): [lambda *_: None],
    ("POST", BEST): [lambda *_: None],
    ("DELETE", BEST): [lambda *_: None],
    ("DELETE", CHECKPOINT): [lambda *_: None],
    ("GET", CHECKPOINT + "/archive"): [lambda *_: None],
    ("GET", CHECKPOINT + "/external_weights_urls"): [lambda *_: None],
    ("POST", "/api/v1/retrieve_future"): [lambda ids, _: {"request_id": ids.request}],
    ("POST", "/api/v1/retrieve_futures"): [
        lambda ids, _: {
            "target": {"type": "sampling_session", "sampling_session_id": ids.sampler},
            "timeout": 0,
        }
    ],
    ("POST", "/api/v1/join_sampling_session"): [lambda ids, _: {"sampling_session_id": ids.sampler}],
    ("POST", "/api/v1/cancel_future"): [lambda ids, _: {"request_id": ids.request}],
    ("POST", "/api/v1/sessions/{session_id}/finish"): [lambda *_: FINISH],
    ("GET", "/oai/api/v1/models/{model}"): [lambda *_: None],
    ("POST", "/oai/api/v1/completions"): [
        lambda ids, _: {"model": ids.path("sampler_weights"), "prompt": [1, 2], "max_tokens": 1}
    ],
    ("POST", "/oai/api/v1/chat/completions"): [
        lambda ids, _: {
            "model": ids.path("sampler_weights"),
            "messages": [{"role": "user", "content": "a"}],
            "max_tokens": 1,
        }
    ],
    ("POST", "/oai/api/v1/responses"): [
        lambda ids, _: {"model": ids.path("sampler_weights"), "input": "a", "max_output_tokens": 1}
    ],
    ("GET", "/anthropic/api/v1/models/{model}"): [lambda *_: None],
    ("POST", "/anthropic/api/v1/messages"): [lambda ids, _: {**_counted(ids), "max_tokens": 1}],
    ("POST", "/anthropic/api/v1/messages/count_tokens"): [lambda ids, _: _counted(ids)],
}

TRAJECTORY = "/api/v1/trajectories/{trajectory_id}"
IN_TRAJECTORY = "/oai/api/in/{trajectory}/v1"
WITH_IDS |= {
    ("GET", TRAJECTORY): [lambda *_: None],
    ("POST", TRAJECTORY + "/rewards"): [lambda *_: {"reward": 1.0}],
    ("POST", TRAJECTORY + "/finish"): [lambda *_: None],
    ("POST", TRAJECTORY + "/keys"): [lambda *_: {}],
    ("POST", "/api/v1/trajectories/sequences"): [lambda ids, _: {"ids": [ids.trajectory]}],
    ("DELETE", TRAJECTORY): [lambda *_: None],
    ("GET", IN_TRAJECTORY + "/models/{model}"): [lambda *_: None],
    # A trajectory that the sender does not have is made; the weights are another's.
    **{
        (method, IN_TRAJECTORY.replace("oai", api) + path): WITH_IDS[method, f"/{api}/api/v1{path}"]
        for method, api, path in (
            ("POST", "oai", "/chat/completions"),
            ("POST", "oai", "/responses"),
            ("POST", "anthropic", "/messages"),
            ("POST", "anthropic", "/messages/count_tokens"),
            ("GET", "anthropic", "/models/{model}"),
        )
    },
}

STREAM = ("GET", "/console/api/stream")  # its answer never ends

# What is in their answers belongs to the caller; test_isolation.py looks at them one by one.
LISTINGS = {
    ("GET", f"/api/v1/{name}")
    for name in "sessions training_runs checkpoints audit billing/usage/checkpoints/current".split()
} | {
    ("GET", "/oai/api/v1/models"),
    ("GET", "/anthropic/api/v1/models"),
    ("GET", "/oai/api/in/{trajectory}/v1/models"),
    ("GET", "/anthropic/api/in/{trajectory}/v1/models"),
    ("GET", "/api/v1/trajectories"),
    ("GET", USAGE),
    ("GET", "/console/api/runs"),
    ("GET", "/console/api/open_runs"),
    ("GET", "/console/api/checkpoints"),
    STREAM,
}

# What a route must be asked with.
QUERIES = {("GET", USAGE): "?starting_on=2026-01-01T00:00:00Z&ending_before=2026-01-01T01:00:00Z"}

# They are given no id, and tell nothing of anybody.
WITHOUT_IDS: dict[tuple[str, str], object] = {
    ("POST", "/api/v1/client/config"): {"sdk_version": "0.38.0"},
    ("POST", "/api/v1/client/dynamic_config"): {"sdk_version": "0.38.0"},
    ("POST", "/api/v1/telemetry"): {"events": []},
    ("POST", "/api/v1/create_session"): {"tags": [], "sdk_version": "0.38.0"},
    ("POST", "/api/v1/external_weights_upload_start"): {
        "base_model": BASE_MODEL,
        "lora_config": {"rank": 8},
    },
    ("POST", "/api/v1/checkpoints/search"): {"owner": {"type": "accessible"}},  # a listing, too
    ("POST", "/api/v1/sessions/search"): {"owner": {"type": "accessible"}},  # a listing, too
    ("POST", "/api/v1/trajectories"): {},
    # Refused, whatever it asks for.
    ("POST", "/oai/api/in/{trajectory}/v1/completions"): {"model": BASE_MODEL, "prompt": "a"},
    ("GET", "/api/v1/get_server_capabilities"): None,
    ("GET", "/api/v1/auth/apikey/me"): None,
    ("DELETE", "/api/v1/auth/apikey/me"): None,
    ("GET", "/console/api/session"): None,
    ("GET", "/metrics"): None,
}

SCHEMA = {("GET", path) for path in ("/schema", "/schema/openapi.json", "/schema/{path}")}

OPEN = {("GET", "/api/v1/healthz"), ("GET", "/healthz"), ("GET", "/readyz")} | {
    ("GET", f"/console{path}") for path in ("", "/{page}", "/assets/{asset}")
}
# They lead to pages of the console, and need no key either.
REDIRECTS = {
    ("GET", f"/{path}")
    for path in (
        "",
        "training_runs/{run_id}",
        "sessions",
        "sessions/{session_id}",
        "checkpoints/{run_id}/{checkpoint_id}",
        "playground",
    )
}

# They tell of all owners; console/test_server.py and console/test_people.py ask as somebody else.
ADMIN = {
    ("GET", "/console/api/server"),
    ("GET", "/console/api/keys"),
    ("DELETE", "/console/api/keys/{key_id}"),
    ("GET", "/console/api/usage"),
}

# They check a key in the body, or need none; console/test_sign_in.py tries them.
SIGN_IN = {("POST", "/console/api/session"), ("DELETE", "/console/api/session")}

TRACE = ("GET", "/api/v1/sessions/{session_id}/trace")

# They need a signature instead of a key; tinker/test_downloads.py tries those of others.
SIGNED = {
    (method, "/api/v1/downloads/" + address)
    for method in ("GET", "HEAD")
    for address in (
        "files/{run_id}/{kind}/{name}/{version}/{file}",
        "archives/{run_id}/{kind}/{name}/{version}",
    )
} | {TRACE, ("PUT", "/api/v1/uploads/{upload_id}/{file}")}

READING = {
    ("POST", f"/api/v1/{name}")
    for name in (
        "client/config client/dynamic_config telemetry get_info weights_info retrieve_future "
        "retrieve_futures sessions/search checkpoints/search trajectories/sequences"
    ).split()
} | {("POST", f"/anthropic/api{path}/v1/messages/count_tokens") for path in ("", "/in/{trajectory}")}


def all_routes(app: Litestar) -> set[tuple[str, str]]:
    """Return the method and path of each route."""
    routes = [route for route in app.routes if isinstance(route, HTTPRoute)]
    return {(method, route.path_format) for route in routes for method in route.methods - {"OPTIONS"}}


async def send(
    client: httpx.AsyncClient, route: tuple[str, str], ids: Ids, body: object = None
) -> httpx.Response:
    """Ask for something by its ids."""
    method, path = route
    kind = "external_weights" if path.endswith("urls") else "weights"
    filled = path.format(
        session_id=ids.session,
        run_id=ids.model,
        sampler_id=ids.sampler,
        request_id=ids.request,
        kind=kind,
        name=ids.name,
        version="v",
        file="f",
        upload_id=ids.upload,
        trajectory_id=ids.trajectory,
        trajectory=ids.trajectory,
        key_id="00000000",
        number=0,
        checkpoint_id=f"weights/{ids.name}",
        page="runs",
        asset="console.js",
        path="openapi.json",
        model=ids.path("sampler_weights"),
    )
    url = client.base_url.copy_with(raw_path=(filled + QUERIES.get(route, "")).encode())
    if isinstance(body, bytes):
        return await client.request(
            method, url, content=body, headers={"content-type": "application/x-protobuf"}
        )
    return await client.request(method, url, json=body)
