"""Odd requests about sessions, checkpoints, usage and the audit log."""

from urllib.parse import quote, urlencode

from tests.fuzz.calls import API, Call, Names, pick
from tests.fuzz.odd_training import posted
from tests.fuzz.oddities import Oddities, as_json

EDGES = (
    "0001-01-01T00:00:00Z",
    "9999-12-31T23:00:00Z",
    "253402300800",
    "2026-01-01T00:00:00Z",
    "1970-01-01T00:00:00Z",
)
PERIODS = (
    ("2026-01-01T00:00:00Z", "2026-01-02T00:00:00Z"),
    ("9999-12-31T00:00:00Z", "9999-12-31T23:00:00Z"),
    ("0001-01-01T00:00:00Z", "0001-01-01T01:00:00Z"),
)
DAYS = "0001-01-01", "9999-12-31", "9999-12-30", "2026-02-29", "1970-01-01", "10000-01-01"


def create_session(odd: Oddities, names: Names) -> Call:
    body = {"tags": ["a"], "user_metadata": {"k": "v", "n": {"x": [1]}}, "sdk_version": "0.38.0"}
    return posted(odd, "create_session", {**body, "project_id": "p", "display_name": "d"}, 0.9)


def about_session(odd: Oddities, names: Names) -> Call:
    where = f"sessions/{quote(names.session, safe='')}"
    match odd.random.randrange(5):
        case 0:
            return posted(odd, "session_heartbeat", {"session_id": names.session})
        case 1:
            body = odd.spoilt({"project_id": "p"})
            return Call("PUT", f"{API}{where}/project", as_json(body, odd.random))
        case 2:
            return asked(odd, f"{where}/trace_export", {})
        case 3:
            return posted(odd, "get_info", {"model_id": names.model})
    return posted(odd, "weights_info", {"tinker_path": names.checkpoint("weights")})


def search(odd: Oddities, names: Names) -> Call:
    statuses = [{"type": "active"}, {"type": "client_finished", "reasons": ["success"]}]
    cursor = {"last_created_at": odd.random.choice(EDGES), "last_session_id": names.session}
    owner = odd.random.choice(
        [{"type": "own"}, {"type": "accessible"}, {"type": "user", "owner_urns": ["mallory"]}]
    )
    body = {
        "user_metadata": {"k": "v"},
        "owner": owner,
        "limit": 50,
        "display_name": "d",
        "project_ids": ["p"],
    }
    more = {"statuses": statuses, "cursor": cursor, "session_id": names.session}
    return posted(odd, "sessions/search", {**body, **{key: more[key] for key in more if odd.chance(0.5)}})


def query(odd: Oddities, names: Names) -> Call:
    page = {"limit": "20", "offset": "0"}
    period = odd.random.choice(PERIODS if odd.chance(0.8) else [EDGES[:2]])
    questions = {
        "audit": {"event_type": "all", "day": odd.random.choice(DAYS)},
        "billing/usage/events": dict(zip(("starting_on", "ending_before"), period, strict=True)),
        "billing/usage/checkpoints/current": {"project_id": "p"},
        "training_runs": {**page, "access_scope": "owned", "project_id": "p"},
        "checkpoints": page,
        "sessions": {**page, "access_scope": "accessible"},
    }
    path = odd.random.choice(list(questions))
    return asked(odd, path, questions[path])


def about_checkpoint(odd: Oddities, names: Names) -> Call:
    kind = odd.random.choice(["weights", "sampler_weights", "external_weights"])
    name = odd.text() if odd.chance(0.15) else "ck"
    where = f"{API}training_runs/{quoted(names.model)}/checkpoints/{kind}/{quoted(name)}"
    match odd.random.randrange(8):
        case 0:
            return Call("PUT", where + "/ttl", as_json(odd.spoilt({"ttl_seconds": 3600}), odd.random))
        case 1:
            return Call("POST", where + "/publish")
        case 2:
            return Call("DELETE", where + "/publish")
        case 3:
            place = odd.random.choice(["archive", "external_weights_urls"])
            if place == "external_weights_urls" and odd.chance(0.8):
                where = where.replace(f"/{kind}/", "/external_weights/")
            return Call("GET", f"{where}/{place}")
        case 4:
            return Call("DELETE", where)
        case 5 | 6:
            return Call("GET", pick(odd.random, names.links, API + "downloads/files/a/b/c/d/e"))
    return copy(odd, names, kind)


def copy(odd: Oddities, names: Names, kind: str) -> Call:
    body = {"source_path": names.checkpoint(kind), "ttl_seconds": 3600}
    if odd.chance(0.5):
        return posted(odd, "copy_weights", {**body, "destination_project_id": "p"})
    return posted(
        odd, "copy_weights", {**body, "session_id": names.session, "model_seq_id": names.next_other()}
    )


def finish(odd: Oddities, names: Names) -> Call:
    body = {"reason": {"type": "success"}, "detail": "done"}
    return posted(odd, f"sessions/{quoted(names.session)}/finish", body, 0.3)


def asked(odd: Oddities, path: str, questions: dict[str, str]) -> Call:
    parameters = dict(questions)
    if parameters and odd.chance(0.4):
        odd_one = odd.random.choice([odd.text()[:2000], str(odd.integer()), str(odd.number())])
        parameters[odd.random.choice(list(parameters))] = odd_one
    return Call("GET", f"{API}{path}?{urlencode(parameters, errors='surrogatepass')}")


def quoted(text: str) -> str:
    return quote(text[:3000], safe=":", errors="surrogatepass") or "-"
