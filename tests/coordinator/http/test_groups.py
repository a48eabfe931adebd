import pytest

from spmd_tx.coordinator.bases.health import GroupHealth
from tests.coordinator.conftest import BASE_MODEL, running_group


@pytest.fixture
def groups(services):
    groups = [
        running_group("main"),
        GroupHealth("teacher", "large", "large", "train and sample", problem="no weights"),
    ]
    services.health.groups[:] = groups
    return groups


async def test_health_lists_the_groups_of_a_server_that_has_several(api, groups):
    answer = (await api.get("http://server/healthz")).json()
    assert answer["groups"] == {
        "main": {"base_model": BASE_MODEL, "state": "ready"},
        "teacher": {
            "base_model": "large",
            "state": "failed",
            "detail": "failed, and tried again later: no weights",
        },
    }


async def test_health_of_a_server_with_one_group_is_as_before(api):
    assert (await api.get("http://server/healthz")).json() == {"status": "ok"}


@pytest.mark.parametrize(
    ("query", "code"),
    [
        ({}, 200),
        ({"group": "main"}, 200),
        ({"base": BASE_MODEL}, 200),
        ({"group": "teacher"}, 503),
        ({"group": "teacher", "base": BASE_MODEL}, 404),
        ({"group": "nobody"}, 404),
        ({"base": "unknown"}, 400),
    ],
)
async def test_readiness_can_be_asked_of_a_group_or_a_base(api, groups, query, code):
    assert (await api.get("http://server/readyz", params=query)).status_code == code


async def test_replicas_are_ready_when_any_of_them_is(api, services):
    groups = services.health.groups[:] = [running_group("rollouts/0"), running_group("rollouts/1")]
    groups[0].ready, groups[0].record.busy = False, "waiting for the agent of worker 0"
    assert groups[0].state == "waiting for agents"
    names = "rollouts", "rollouts/0", "rollouts/1"
    answers = [await api.get("http://server/readyz", params={"group": name}) for name in names]
    assert [answer.status_code for answer in answers] == [200, 503, 200]


async def test_new_work_on_a_base_whose_groups_have_failed_is_refused_with_the_reason(
    api, services, session_id, model_id
):
    body = {"session_id": session_id, "sampling_session_seq_id": 0, "base_model": BASE_MODEL}
    sampler = (await api.post("create_sampling_session", json=body)).json()["sampling_session_id"]
    (group,) = services.health.groups
    group.problem = "no weights"
    prompt = {"chunks": [{"tokens": [1, 2], "type": "encoded_text"}]}
    sample = {"sampling_session_id": sampler, "seq_id": 0, "prompt": prompt, "sampling_params": {}}
    step = {"model_id": model_id, "seq_id": 1, "adam_params": {}}
    model = {
        "session_id": session_id,
        "model_seq_id": 1,
        "base_model": BASE_MODEL,
        "lora_config": {"rank": 8},
    }
    for route, json in (
        ("asample", sample),
        ("optim_step", step),
        ("create_model", model),
    ):
        answer = await api.post(route, json=json)
        assert answer.status_code == 503, route
        assert "group main has failed, and tried again later: no weights" in answer.text
    group.problem = None
    assert (await api.post("optim_step", json=step)).status_code == 200, "the number was not used"
