import numpy as np
import pytest

from spmd_tx.coordinator.requests.sample_notes import NoteWriter
from spmd_tx.coordinator.sampling.routing_notes import RoutingFiles, encode
from spmd_tx.coordinator.wire.training_protobuf import TokenSpan
from spmd_tx.errors import DamagedBody

SESSION, REQUEST = "session:1", "abc123"
LAYERS, CHOICES = 3, 2
PROMPT, SAMPLED = 5, (4, 6)  # tokens


def experts(count: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 200, (count, LAYERS, CHOICES), np.uint8)


OF_PROMPT = experts(PROMPT - 1, 0)
OF_SAMPLES = [experts(count, seed) for seed, count in enumerate(SAMPLED, start=1)]


@pytest.fixture
def files(tmp_path):
    NoteWriter(tmp_path).write(SESSION, REQUEST, {"routing": encode(OF_PROMPT, OF_SAMPLES)})
    return RoutingFiles(tmp_path)


def prompt(place: int, offset: int, length: int) -> TokenSpan:
    return TokenSpan(f"{REQUEST}:{place}", False, offset, length)


def sampled(place: int, offset: int, length: int) -> TokenSpan:
    return TokenSpan(f"{REQUEST}:{place}", True, offset, length)


@pytest.mark.parametrize("place", [0, 1])
def test_all_tokens_of_a_sample_but_the_last_have_experts(files, place):
    count = SAMPLED[place]
    replayed = files.replayed([SESSION], [prompt(place, 0, PROMPT), sampled(place, 0, count)], PROMPT + count)
    assert replayed.dtype == np.int16
    np.testing.assert_array_equal(replayed[:-1], np.concatenate([OF_PROMPT, OF_SAMPLES[place]]))
    assert np.all(replayed[-1] == -1)


def test_spans_are_laid_end_to_end(files):
    spans = [sampled(1, 1, 2), prompt(0, 1, 3), TokenSpan("unknown:0", False, 0, 2), sampled(0, 2, 1)]
    replayed = files.replayed([SESSION], spans, 8)
    np.testing.assert_array_equal(replayed[:2], OF_SAMPLES[1][2:4])
    np.testing.assert_array_equal(replayed[2:5], OF_PROMPT[1:4])
    assert np.all(replayed[5:7] == -1)
    np.testing.assert_array_equal(replayed[7], OF_SAMPLES[0][3])


def test_a_prompt_of_one_token_has_the_experts_of_the_first_step(tmp_path):
    NoteWriter(tmp_path).write(SESSION, REQUEST, {"routing": encode(None, OF_SAMPLES)})
    files = RoutingFiles(tmp_path)
    replayed = files.replayed([SESSION], [prompt(0, 0, 1), sampled(0, 0, 3)], 4)
    np.testing.assert_array_equal(replayed, OF_SAMPLES[0])


def test_they_are_there_after_a_restart(files, tmp_path):
    again = RoutingFiles(tmp_path)
    replayed = again.replayed([SESSION], [prompt(0, 0, PROMPT - 1)], PROMPT - 1)
    np.testing.assert_array_equal(replayed, OF_PROMPT)


@pytest.mark.parametrize(
    "session, sequence_id",
    [
        ("session:2", f"{REQUEST}:0"),  # of another tenant
        (SESSION, f"{REQUEST}:2"),
        (SESSION, REQUEST),
        (SESSION, f"../session_1/{REQUEST}:0"),
        (SESSION, "/etc/passwd:0"),
        (SESSION, f"{REQUEST}:{'9' * 5000}"),
        (SESSION, f"{'a' * 300}:0"),
    ],
)
def test_of_what_the_session_has_not_sampled_nothing_is_known(files, session, sequence_id):
    assert files.replayed([session], [TokenSpan(sequence_id, False, 0, 4)], 4) is None


@pytest.mark.parametrize("kept", [0.0, 0.5, 0.99])
def test_a_damaged_file_is_named(files, tmp_path, kept):
    (file,) = (tmp_path / "routing").rglob("*.zst")
    file.write_bytes(file.read_bytes()[: int(kept * file.stat().st_size)])
    with pytest.raises(DamagedBody, match=f"{file}, which holds the experts of a sample, is damaged"):
        files.replayed([SESSION], [prompt(0, 0, PROMPT)], PROMPT)


def test_without_spans_nothing_is_replayed(files):
    assert files.replayed([SESSION], [], 4) is None


def test_notes_are_durable_with_their_names_once_the_writer_is_finished(tmp_path, synced):
    writer = NoteWriter(tmp_path)
    for request in ("first", "second"):
        writer.write(SESSION, request, {"routing": encode(None, OF_SAMPLES)})
    folder = tmp_path / "routing" / "session_1"
    assert {tmp_path, tmp_path / "routing", folder / "first.tmp", folder / "second.tmp"} <= set(synced)
    synced.clear()
    writer.finish()
    assert synced == [folder]
