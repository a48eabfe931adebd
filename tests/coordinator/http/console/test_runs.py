import itertools

import msgspec
import pytest

from tests.coordinator.http.real_server import bound as bound  # a fixture
from tests.coordinator.requests.runs.test_run_metrics import step


@pytest.fixture
async def run_id(api, session_id):
    body = {
        "session_id": session_id,
        "model_seq_id": 0,
        "base_model": "Qwen/Qwen3-0.6B",
        "lora_config": {"rank": 8},
    }
    return (await api.post("create_model", json=body)).json()["model_id"]


async def test_runs_are_listed_with_their_newest_metrics(api, services, run_id):
    await step(services.database, 1, loss=2.5, line=run_id)
    page = (await api.get("http://server/console/api/runs")).json()
    (run,) = page["runs"]
    assert (run["id"], run["rank"], run["steps"], run["is_open"]) == (run_id, 8, 1, True)
    assert run["display_name"] is None  # its session has no name
    assert run["last"]["loss:sum"] == 2.5
    assert page["next_cursor"] is None
    assert (await api.get(f"http://server/console/api/runs/{run_id}")).json() == run


async def test_a_run_says_what_in_its_metrics_needs_a_look(api, services, run_id):
    await step(services.database, 1, loss=float("nan"), line=run_id)
    found = (await api.get(f"http://server/console/api/runs/{run_id}")).json()
    assert found["alarms"] == ["not finite: loss:sum"]


async def test_pages_of_runs_follow_each_other(api, session_id):
    for number in range(3):
        await api.post(
            "create_model",
            json={
                "session_id": session_id,
                "model_seq_id": number,
                "base_model": "Qwen/Qwen3-0.6B",
                "lora_config": {"rank": 8},
            },
        )
    first = (await api.get("http://server/console/api/runs?limit=2")).json()
    rest = (await api.get(f"http://server/console/api/runs?limit=2&cursor={first['next_cursor']}")).json()
    assert [run["id"] for run in first["runs"] + rest["runs"]] == [
        f"{session_id}:train:{n}" for n in (2, 1, 0)
    ]
    assert rest["next_cursor"] is None


@pytest.fixture
async def three_runs(api, services, session_id):
    """Runs of several ranks with metadata, of which the middle one has metrics."""
    for number, (rank, name) in enumerate([(2, "Straße nach Süden"), (8, "half rate"), (4, "whole rate")]):
        body = {
            "session_id": session_id,
            "model_seq_id": number,
            "base_model": "Qwen/Qwen3-0.6B",
            "lora_config": {"rank": rank},
            "user_metadata": {"name": name},
        }
        (await api.post("create_model", json=body)).raise_for_status()
    await step(services.database, 1, loss=2.5, line=f"{session_id}:train:1")


async def numbers(api, **query):
    """The numbers of the runs of one page, and where the next one begins."""
    answer = (await api.get("http://server/console/api/runs", params=query)).raise_for_status().json()
    return [int(run["id"].rpartition(":")[2]) for run in answer["runs"]], answer["next_cursor"]


@pytest.mark.parametrize(
    "query, found",
    [
        ({"search": "RATE"}, [2, 1]),
        ({"search": "rate half"}, [1]),
        ({"search": "STRASSE süden"}, [0]),
        ({"search": "train:2"}, [2]),
        ({"search": "half süden"}, []),
        ({"sort": "rank"}, [1, 2, 0]),
        ({"sort": "rank", "ascending": "true", "search": "rate"}, [2, 1]),
        ({"sort": "created", "ascending": "true"}, [0, 1, 2]),
        ({"sort": "changed"}, [1, 2, 0]),
        ({"sort": "model"}, [2, 1, 0]),  # the newest first among equals
        ({"sort": "owner"}, [2, 1, 0]),
        ({"sort": "group"}, [2, 1, 0]),
    ],
)
async def test_runs_are_searched_and_sorted(api, three_runs, query, found):
    assert await numbers(api, **query) == (found, None)


async def test_a_search_goes_on_where_its_page_has_ended(api, three_runs):
    assert await numbers(api, search="rate", limit=1) == ([2], 1)
    assert await numbers(api, search="rate", limit=1, cursor=1) == ([1], None)


async def test_a_search_that_takes_long_goes_on_in_the_next_page(api, bound, three_runs):
    bound(search_seconds=0)
    assert await numbers(api, search="süden") == ([], 1)
    assert await numbers(api, search="süden", cursor=1) == ([], 2)
    assert await numbers(api, search="süden", cursor=2) == ([0], None)


@pytest.mark.parametrize(
    "query, complaint", [({"search": "x" * 201}, "search has 201 characters"), ({"sort": "colour"}, "sort")]
)
async def test_an_odd_search_is_refused(api, query, complaint):
    answer = await api.get("http://server/console/api/runs", params=query)
    assert answer.status_code == 400
    assert complaint in str(answer.json())


async def test_what_a_client_logs_is_read_beside_the_servers_metrics(api, services, run_id):
    assert (
        await api.post(f"training_runs/{run_id}/metrics", json={"metrics": {"reward": 0.5}})
    ).status_code == 200
    await step(services.database, 1, loss=2.5, line=run_id)
    answer = (await api.get(f"training_runs/{run_id}/metrics")).json()
    (point,) = answer["points"]
    assert (point["step"], point["metrics"]["reward"], point["metrics"]["loss:sum"]) == (0, 0.5, 2.5)
    assert answer["next_after"] is None
    assert (await api.get(f"http://server/console/api/runs/{run_id}/metrics")).json() == answer


async def test_curves_grow_with_what_is_new(api, services, run_id):
    address, looks = f"http://server/console/api/runs/{run_id}/curves", itertools.count()

    async def curves(**query):
        query = {"last": 1000 + next(looks)} | query  # the answer of a moment ago would be the same
        answer = (await api.get(address, params=query)).raise_for_status()
        assert answer.headers["content-encoding"] == "gzip"
        found = answer.json()
        return found["names"], {each["name"]: (each["x"], each["y"]) for each in found["curves"]}

    assert await curves() == ([], {})
    await step(services.database, 1, loss=2.5, line=run_id)
    said = {"metrics": {"reward": 0.5}, "step": 40}
    (await api.post(f"training_runs/{run_id}/metrics", json=said)).raise_for_status()
    names, found = await curves()
    assert names == ["reward", "learning_rate:mean", "loss:sum", "num_datums:sum"]
    assert (found["reward"], found["loss:sum"]) == (([40.0], [0.5]), ([0.0], [2.5]))
    await step(services.database, 3, loss=2.0, line=run_id)
    assert (await curves(name=["loss:sum"]))[1] == {"loss:sum": ([0.0, 1.0], [2.5, 2.0])}
    assert (await curves(name=["loss:sum", "reward"], first=1, last=30))[1] == {
        "loss:sum": ([0.0, 1.0], [2.5, 2.0])
    }
    plain = await api.get(address, headers={"Accept-Encoding": "identity"})
    assert "content-encoding" not in plain.headers
    assert plain.json()["names"] == names
    refused = await api.get(address, params={"name": [str(number) for number in range(65)]})
    assert refused.status_code == 400
    assert "65 names; ask for 64 curves at a time" in refused.json()["detail"]


@pytest.mark.parametrize(
    "body, complaint",
    [
        ({"metrics": {}}, "metrics has 0 entries"),
        ({"metrics": {str(n): 1.0 for n in range(300)}}, "metrics has 300 entries; send 1 to 256"),
        ({"metrics": {"reward": "high"}}, "metrics"),
        ({"metrics": {"reward": 1.0}, "step": -1}, "step is -1"),
    ],
)
async def test_odd_metrics_are_refused(api, run_id, body, complaint):
    answer = await api.post(f"training_runs/{run_id}/metrics", json=body)
    assert answer.status_code == 400
    assert complaint in answer.json()["detail"]


@pytest.mark.parametrize(
    "page, names",
    [
        ("", "limit cursor"),
        ("/RUN/metrics", "after logged_after limit"),
        ("/RUN/timing", "seconds"),
        ("/RUN/samples", "start limit"),
        ("/../usage", "hours"),
    ],
)
async def test_numbers_beyond_the_databases_are_no_error_of_the_server(api, run_id, page, names):
    address = f"http://server/console/api/runs{page.replace('RUN', run_id)}"
    for name in names.split():
        for number in (-(10**30), -1, 0, 2**63 - 1, 2**63, 10**30):
            answer = await api.get(f"{address}?{name}={number}")
            assert answer.status_code == 200, (name, number)


async def test_a_time_that_is_no_number_is_refused(api, run_id):
    answer = await api.get(f"http://server/console/api/runs/{run_id}/timing?seconds=NaN")
    assert answer.status_code == 400
    assert "seconds is not a number" in answer.json()["detail"]


async def test_a_page_of_runs_ends_when_its_bytes_are_reached(api, services, session_id, bound):
    ids = []
    for number in range(4):
        body = {
            "session_id": session_id,
            "model_seq_id": number,
            "base_model": "Qwen/Qwen3-0.6B",
            "lora_config": {"rank": 8},
            "user_metadata": {"notes": "x" * 40_000},
        }
        ids.append((await api.post("create_model", json=body)).json()["model_id"])
    bound(answer_bytes=100_000)
    seen, cursor = [], 0
    while cursor is not None:
        page = (await api.get(f"http://server/console/api/runs?cursor={cursor}")).json()
        assert 0 < len(page["runs"]) <= 2
        seen += [run["id"] for run in page["runs"]]
        cursor = page["next_cursor"]
    assert seen == ids[::-1]


async def test_what_a_client_sends_of_a_step_beyond_the_run_is_shown_with_that_step(api, services, run_id):
    await step(services.database, 1, line=run_id)
    sent = {"metrics": {"reward": 0.5}, "step": 5000}
    (await api.post(f"training_runs/{run_id}/metrics", json=sent)).raise_for_status()
    for address in (f"training_runs/{run_id}/metrics", f"http://server/console/api/runs/{run_id}/metrics"):
        answer = (await api.get(address)).json()
        assert [(each["step"], each["metrics"]) for each in answer["logged"]] == [(5000, {"reward": 0.5})]
        assert [each["step"] for each in answer["points"]] == [0]
        last = answer["logged"][-1]["number"]
        assert "logged" not in (await api.get(f"{address}?logged_after={last}")).json()
    (run,) = (await api.get("http://server/console/api/runs")).json()["runs"]
    assert run["last"]["reward"] == 0.5


async def test_names_of_metrics_are_bounded(api, services, run_id, monkeypatch):
    async def log(*names, run=run_id):
        body = {"metrics": dict.fromkeys(names, 1.0)}
        return await api.post(f"training_runs/{run}/metrics", json=body)

    refused = await log("x" * 257)
    assert refused.status_code == 400
    assert "has 257 characters, and the most is 256" in refused.json()["detail"]
    monkeypatch.setattr(services.metric_names, "_most", 3)
    assert (await log("a", "b", "c")).status_code == 200
    services.metric_names._known.clear()  # a server that was started again learns them from the rows
    assert (await log("a", "c")).status_code == 200
    refused = await log("a", "d")
    assert refused.status_code == 400
    assert "has 3 metrics of its client, this message names 1 others, such as 'd'" in refused.json()["detail"]


async def test_metrics_of_a_day_are_bounded_for_each_owner(api, services, run_id, monkeypatch):
    most = msgspec.structs.replace(services.config.bounds, metrics_bytes_per_day=1 << 20)
    monkeypatch.setattr(services.quotas, "_bounds", most)
    body = {"metrics": {f"{number:03d}" + "x" * 250: 1.0 for number in range(256)}}
    answers = [await api.post(f"training_runs/{run_id}/metrics", json=body | {"step": n}) for n in range(16)]
    statuses = [answer.status_code for answer in answers]
    assert statuses == sorted(statuses)
    assert {200, 429} == set(statuses)
    assert int(answers[-1].headers["retry-after"]) > 0
    answer = (await api.get(f"training_runs/{run_id}/metrics")).json()
    assert len(answer["logged"]) == statuses.count(200)  # what was refused is not there


async def test_a_run_whose_client_is_silent_is_still_open_and_says_so(api, services, run_id, session_id):
    await step(services.database, 1, loss=2.5, line=run_id)  # else nothing of it would be lost
    services.catalog._last_seen[session_id] -= 95
    (run,) = (await api.get("http://server/console/api/runs")).json()["runs"]
    assert run["is_open"]
    assert run["health"]["state"] == "silent"
    session = (await api.get(f"sessions/{session_id}")).json()
    assert session["is_open"]
    assert 95 <= session["silent_seconds"] < 120
    (found,) = (await api.post("sessions/search", json={"session_id": session_id})).json()["sessions"]
    assert found["status"]["type"] == "active"
    assert 95 <= found["status"]["silent_seconds"] < 120

    await api.post("session_heartbeat", json={"session_id": session_id})
    session = (await api.get(f"sessions/{session_id}")).json()
    assert (session["is_open"], session["silent_seconds"]) == (True, None)
    await api.post(f"sessions/{session_id}/finish", json={"reason": {"type": "success"}, "detail": None})
    session = (await api.get(f"sessions/{session_id}")).json()
    assert (session["is_open"], session["silent_seconds"]) == (False, None)


async def test_runs_are_found_by_the_beginning_of_their_id(api, run_id):
    async def found(beginning):
        page = await api.get("http://server/console/api/runs", params={"beginning": beginning})
        return [run["id"] for run in page.json()["runs"]]

    assert await found(run_id[:6]) == [run_id]
    assert await found(run_id) == [run_id]
    assert await found(run_id[1:6]) == []
    refused = await api.get("http://server/console/api/runs", params={"beginning": "%"})
    assert refused.status_code == 400
    assert "beginning is '%'" in refused.text
