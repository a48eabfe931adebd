"""Two base models behind one address: each is found by its names, and nothing of one goes to the other."""

from dataclasses import replace

import msgspec
import pytest
from sqlalchemy import select

from spmd_tx.config import ServerConfig
from spmd_tx.coordinator.bases.bases import Bases
from spmd_tx.coordinator.bases.served_base import BaseHistory, open_base
from spmd_tx.coordinator.catalog.served_names import ServedNames
from spmd_tx.coordinator.checkpoints.catalog import SaveOptions
from spmd_tx.coordinator.http.security.access import Access
from spmd_tx.coordinator.retention.rules import Ages, forget_requests
from spmd_tx.coordinator.storage.tables import PastRequest, RequestRow
from spmd_tx.coordinator.tenancy.callers import EVERYONE
from spmd_tx.coordinator.text.served_model import ServedModel
from spmd_tx.coordinator.wire.checkpoint_paths import CheckpointPath
from spmd_tx.errors import StartError
from spmd_tx.protocol.commands import AdapterSpec
from tests.coordinator.conftest import BASE_MODEL, run_services, tiny_served_model
from tests.support.model_shapes import TINY, resized

A, B, SAMPLED = BASE_MODEL, "mine/large", "mine/teacher"
LARGE = resized(TINY, architecture="Qwen3MoeForCausalLM", n_experts=4, experts_per_token=2, d_ff=16)


def base_called(name, context, data_dir, stack, role="train"):
    """A base model of another size and family, with the same tokenizer."""
    config = ServerConfig(
        base_model="/models/x",
        served_model_name=name,
        data_dir=data_dir,
        host="server",
        max_lora_rank=16,
        role=role,
    )
    of_first = tiny_served_model(data_dir / "model")
    model = ServedModel(of_first.directory, LARGE, context, of_first.text)
    return open_base(config, model, stack)


def others(data_dir, stack):
    return [
        base_called(f"{B},large", 64, data_dir, stack),
        base_called(SAMPLED, 32, data_dir, stack, role="sample"),
    ]


@pytest.fixture
async def services(database_url, tmp_path):
    async with run_services(tmp_path, database_url, others) as services:
        yield services


async def post(api, route, **body):
    answer = await api.post(route, json=body)
    return answer.status_code, answer.json()


async def create(api, session_id, number, base_model):
    body = {"session_id": session_id, "model_seq_id": number, "base_model": base_model}
    status, answer = await post(api, "create_model", **body, lora_config={"rank": 8})
    assert status == 200, answer
    return answer["model_id"]


async def saved(services, model_id, kind="weights"):
    """A checkpoint of a model."""
    model, path = await services.catalog.model(model_id), CheckpointPath(model_id, kind, "x")
    staged = await services.checkpoints.begin(path, SaveOptions())
    staged.mkdir(parents=True)
    (staged / "file").write_bytes(b"weights")
    base = services.bases.of_row(model.base_model).checkpoints
    await services.checkpoints.complete(path, staged, AdapterSpec(rank=8), SaveOptions(), base)
    return str(path)


async def test_capabilities_list_every_name_with_its_context_and_what_it_is_for(api):
    answer = (await api.get("get_server_capabilities")).json()
    listed = [
        (each["model_name"], each["max_context_length"], each["trainable"])
        for each in answer["supported_models"]
    ]
    assert listed == [(A, 128, True), (B, 64, True), ("large", 64, True), (SAMPLED, 32, False)]
    assert all(each["sampleable"] for each in answer["supported_models"])


@pytest.mark.parametrize("asked, name", [(A, A), (B, B), ("large", B), ("large:peft:40", f"{B}:peft:40")])
async def test_a_model_is_one_of_the_base_that_was_asked_for(api, session_id, asked, name):
    model_id = await create(api, session_id, 0, asked)
    _, info = await post(api, "get_info", model_id=model_id)
    assert info["model_name"] == name
    assert info["model_data"]["arch"] == ("Qwen3MoeForCausalLM" if name != A else TINY.architecture)


async def test_a_base_that_is_only_sampled_says_which_ones_can_be_trained(api, session_id):
    body = {"session_id": session_id, "model_seq_id": 0, "lora_config": {"rank": 8}}
    status, answer = await post(api, "create_model", base_model=SAMPLED, **body)
    assert status == 400
    assert answer["error"] == f"{SAMPLED} is only sampled from here; models that can be trained: {A}, {B}"
    status, answer = await post(api, "create_model", base_model="mine/other", **body)
    assert status == 400
    assert all(repr(name) in answer["error"] for name in ("mine/other", A, B, SAMPLED))


async def test_a_context_is_that_of_the_base(api, session_id):
    body = {"session_id": session_id, "sampling_session_seq_id": 0}
    status, answer = await post(api, "create_sampling_session", base_model=f"{B}:peft:65", **body)
    assert (status, "1 to 64 tokens" in answer["error"]) == (400, True)


async def sampler(api, session_id, number, **weights):
    body = {"session_id": session_id, "sampling_session_seq_id": number}
    return await post(api, "create_sampling_session", **body, **weights)


async def asample(api, sampler_id, length):
    prompt = {"chunks": [{"tokens": [1] * length, "type": "encoded_text"}]}
    body = {"sampling_session_id": sampler_id, "seq_id": 0, "prompt": prompt}
    return await post(api, "asample", **body, sampling_params={"max_tokens": 2})


async def test_samples_are_checked_against_the_base_of_their_sampler(api, services, session_id):
    for number, (name, fits) in enumerate([(A, True), (B, True), (SAMPLED, False)]):
        _, created = await sampler(api, session_id, number, base_model=name)
        status, answer = await asample(api, created["sampling_session_id"], 40)
        assert (status == 200) == fits, answer
    of_b = await saved(services, await create(api, session_id, 0, "large"), "sampler_weights")
    _, created = await sampler(api, session_id, 3, model_path=of_b)
    described = (await api.get(f"samplers/{created['sampling_session_id']}")).json()
    assert (described["base_model"], described["model_path"]) == (B, of_b)
    assert (await asample(api, created["sampling_session_id"], 63))[0] == 400  # with two more, too many
    status, answer = await asample(api, "unknown:sample:0", 500)
    assert status == 404, answer


async def test_a_checkpoint_of_one_base_never_becomes_one_of_another(api, services, session_id):
    a, b = [await create(api, session_id, number, name) for number, name in enumerate((A, B))]
    of_a = await saved(services, a)
    manifest = await services.checkpoints.describe(CheckpointPath(a, "weights", "x"))
    assert manifest.base_model == A
    loaded = (await post(api, "load_weights", model_id=b, seq_id=1, path=of_a))[1]
    outcome = (await post(api, "retrieve_future", request_id=loaded["request_id"]))[1]
    assert f"was trained on '{A}', and this model is one of '{B}'" in outcome["error"]
    status, answer = await post(
        api, "load_weights", session_id=session_id, model_seq_id=2, path=of_a, base_model=B
    )
    assert status == 400
    assert A in msgspec.json.encode(answer).decode()
    assert B in msgspec.json.encode(answer).decode()
    status, answer = await sampler(
        api, session_id, 0, model_path=await saved(services, a, "sampler_weights"), base_model=B
    )
    assert status == 400
    assert f"was trained on '{A}', and base_model is '{B}'" in answer["error"]


async def test_a_model_from_a_checkpoint_is_one_of_its_base(api, services, session_id):
    of_b = await saved(services, await create(api, session_id, 0, B))
    status, answer = await post(api, "load_weights", session_id=session_id, model_seq_id=1, path=of_b)
    assert status == 200, answer
    _, info = await post(api, "get_info", model_id=answer["model_id"])
    assert info["model_name"] == B
    assert (
        await services.checkpoints.find(CheckpointPath(f"{session_id}:train:0", "weights", "x"))
    ).base_model == B


async def test_openai_calls_go_by_the_name_of_the_base(api, services, session_id):
    of_b = await saved(services, await create(api, session_id, 0, B), "sampler_weights")
    listed = (await api.get("http://server/oai/api/v1/models")).json()["data"]
    assert [each["id"] for each in listed] == [A, B, "large", SAMPLED, of_b]
    message = [{"role": "user", "content": "x" * 30}]
    for name, base in ((A, A), ("large", B), (of_b, B)):
        status, answer = await post(
            api, "http://server/oai/api/v1/chat/completions", model=name, messages=message, max_tokens=3
        )
        assert (status, answer["model"]) == (200, name), answer
        chosen = await services.implicit_samplers.of(
            name, Access(EVERYONE, services.catalog, services.checkpoints, services.queue)
        )
        assert chosen.row.base_model == chosen.base.name == base
    status, answer = await post(
        api,
        "http://server/oai/api/v1/chat/completions",
        model=SAMPLED,
        messages=[{"role": "user", "content": "x" * 200}],
    )
    assert status == 400, answer
    status, answer = await post(api, "http://server/oai/api/v1/completions", model="other", prompt="x")
    assert (status, all(name in msgspec.json.encode(answer).decode() for name in (A, B))) == (404, True)


async def test_the_log_keeps_the_base_of_each_request_also_when_its_body_is_gone(api, services, session_id):
    a, b = [await create(api, session_id, number, name) for number, name in enumerate((A, "large:peft:40"))]
    await post(api, "optim_step", model_id=b, seq_id=1, adam_params={})
    of_a = await saved(services, a)
    await post(api, "load_weights", session_id=session_id, model_seq_id=2, path=of_a)
    _, created = await sampler(api, session_id, 0, base_model=SAMPLED)
    await asample(api, created["sampling_session_id"], 4)
    await post(api, "http://server/oai/api/v1/completions", model="large", prompt="x", max_tokens=1)
    expected = [A, B, B, A, SAMPLED, B]
    async with services.database.transaction() as db:
        rows = (await db.scalars(select(RequestRow).order_by(RequestRow.number))).all()
        assert [row.base for row in rows] == expected
        base_of = {row.number: row.base for row in rows}
        await forget_requests(db, Ages(now=1e12, results=1e12, open_results=1e12, versions=1e12))
        kept = (await db.scalars(select(PastRequest))).all()
        assert {row.base for row in kept} >= {SAMPLED, B}
        assert all(row.base == base_of[row.number] for row in kept)


async def test_a_base_is_found_by_names_that_it_had(services):
    base = services.bases.all[1]
    renamed = replace(base, names=ServedNames(("new",), 64), history=BaseHistory(B, ("new", B, "large")))
    bases = Bases([services.bases.default, renamed])
    assert bases.of_row("large:peft:40") is bases.of_row(B) is bases.need("new").base is renamed
    assert (renamed.key, bases.find(B), bases.of_row("unknown")) == (B, None, services.bases.default)
    assert renamed.checkpoints.names == ("new", B, "large")


async def test_two_bases_with_one_name_do_not_start(services):
    with pytest.raises(StartError, match=r"two bases are called .*change served_model_name of one"):
        Bases([*services.bases.all, services.bases.default])
