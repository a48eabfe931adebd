from functools import partial

import msgspec
import pytest

from spmd_tx.bounds import Bounds
from spmd_tx.coordinator.requests.payload_files import PayloadFiles
from spmd_tx.coordinator.requests.runs import sample_reader
from spmd_tx.coordinator.requests.runs.sample_bodies import ShownSize, StoredSample, WantedSamples
from spmd_tx.coordinator.requests.runs.sample_reader import SampleReader
from spmd_tx.coordinator.text.model_text import LazyModelText, load_model_text
from spmd_tx.coordinator.wire.sampling_protobuf import SampledSequence, encode_sample_response
from spmd_tx.errors import InvalidRequest
from tests.coordinator.conftest import tiny_served_model

ALL = ShownSize((100, 100), (100, 100), 8)


@pytest.fixture
def payloads(tmp_path):
    files = PayloadFiles(tmp_path / "payloads")
    yield files
    files.close()


@pytest.fixture
async def reader(tmp_path, payloads):
    model = tiny_served_model(tmp_path / "model").directory
    text = LazyModelText(partial(load_model_text, model))
    reader = SampleReader(tmp_path / "payloads", model, text, Bounds(search_seconds=60.0))
    yield reader
    await reader.close()


@pytest.fixture
def stored(payloads, tokenizer):
    """The samples of three prompts; one is in a file, and one was lost."""

    def body(text):
        chunks = [{"type": "encoded_text", "tokens": tokenizer.encode(text).ids}]
        params = {"max_tokens": 4, "temperature": 0.5, "stop": ["x"]}
        request = {"num_samples": 1, "prompt": {"chunks": chunks}, "sampling_params": params}
        return msgspec.json.encode(request | {"sampling_session_id": "s", "seq_id": 1})

    answer = encode_sample_response([SampledSequence([5, 6], [-0.5, -1.0], "length")])
    (in_file,) = payloads.write([body("hello world " * 200)])
    return [
        StoredSample("s", in_file, answer),
        StoredSample("s", in_file._replace(file=7), answer),
        StoredSample("s", body("good night"), None),
    ]


async def test_a_child_process_reads_and_finds_the_same_as_a_thread(reader, stored, monkeypatch):
    found = []
    for most in (1 << 30, 0):  # bytes, up to which it is done in a thread
        monkeypatch.setattr(sample_reader, "SHORT_BYTES", most)
        bodies = await reader.read(stored, ALL)
        wanted = [WantedSamples(text) for text in ("WORLD", "good", "of none")]
        wanted += [WantedSamples(digest=bodies[0].digest), WantedSamples("good", bodies[0].digest)]
        searched = [await reader.search(stored, each, 9, ALL) for each in wanted]
        found.append((bodies, searched))
    assert found[0] == found[1]
    (first, lost, last), searched = found[0]
    assert first.prompt.left_out > 0
    assert first.answers[0].content.logprobs == [-0.5, -1.0]
    assert (lost, last.answers, last.params.stop) == (None, [], ["x"])
    assert [(each.places, each.looked_at) for each in searched] == [
        (places, 3) for places in ([0], [2], [], [0], [])
    ]


@pytest.mark.parametrize("most", [1 << 30, 0], ids=["thread", "child"])
async def test_what_is_alike_shares_a_prompt_and_the_number_of_answers(reader, stored, monkeypatch, most):
    monkeypatch.setattr(sample_reader, "SHORT_BYTES", most)
    first, _, other = stored
    bodies = await reader.read([first, other, *[first] * 9], ALL, alike=True)
    answers = [None if body is None else (len(body.answers), body.num_answers) for body in bodies]
    assert answers == [(1, 1), None, *[(1, 1)] * 7, *[(0, 1)] * 2]
    assert [body.prompt.length > 0 for body in bodies if body is not None] == [True, *[False] * 9]


async def test_reading_and_searching_end_after_some_time_and_have_done_one_at_least(reader, stored):
    reader._seconds = 0.0
    assert len(await reader.read(stored, ALL)) == 1
    assert await reader.search(stored, WantedSamples("good"), 9, ALL) == ([], 1)


async def test_a_search_ends_with_what_fits_on_a_page(reader, stored):
    assert await reader.search([stored[2]] * 5, WantedSamples("good"), 2, ALL) == ([0, 1], 2)


async def test_what_no_child_can_read_is_refused(reader, stored, monkeypatch):
    monkeypatch.setattr(sample_reader, "SHORT_BYTES", 0)
    monkeypatch.setattr(sample_reader, "_HERE", "tests.support.foreign_code")
    with pytest.raises(InvalidRequest, match="ask for fewer at a time"):
        await reader.read(stored, ALL)
