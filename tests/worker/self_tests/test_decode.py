import msgspec
import numpy as np
import pytest

from spmd_tx.worker.decode_ways import ONE_SHOT, WAYS, options_of, ways_for
from spmd_tx.worker.self_tests import decode as decode_self_test
from spmd_tx.worker.self_tests.decode import DecodeSizes, problem_of
from spmd_tx.worker.self_tests.verdict import Verdict, tell_verdicts

SIZES = DecodeSizes(
    [*WAYS], devices=[0, 1], tp=2, d_model=32, d_ff=32, heads=4, kv_heads=2, head_dim=8, page_size=16
)
TOKENS, LOGPROBS = np.arange(12).reshape(3, 4), np.linspace(-3, -1, 12, dtype=np.float32).reshape(3, 4)


SAME, ROUNDED, WRONG = (TOKENS, LOGPROBS), (TOKENS, LOGPROBS + 1e-3), (TOKENS, LOGPROBS[::-1])


class FakeDecode:
    """Gives the results of one run after the other, and takes so many seconds."""

    def __init__(self, results, seconds):
        self.results, self.seconds = iter(results), seconds

    def __call__(self):
        return next(self.results)


@pytest.fixture
def verdict(monkeypatch):
    def of(way, results, seconds=1e-3):
        decodes = {"plain": FakeDecode([SAME], 2e-3), way: FakeDecode(results, seconds)}
        monkeypatch.setattr(decode_self_test, "decode", lambda name, sizes: decodes[name])
        monkeypatch.setattr(decode_self_test, "seconds", lambda run: run.seconds)
        return problem_of(way, SIZES)

    return of


@pytest.mark.parametrize(
    "way, results, problem",
    [
        ("graphs", [ROUNDED, ROUNDED], "the log-probabilities are not those of the plain way"),
        ("graphs", [SAME, ROUNDED], "the log-probabilities differ between two runs"),
        ("graphs", [(TOKENS + 1, LOGPROBS)] * 2, "the tokens are not those of the plain way"),
        ("one-shot", [WRONG, WRONG], "the log-probabilities are off by"),
        ("one-shot", [(TOKENS, LOGPROBS * np.nan)] * 2, "the log-probabilities are off by nan"),
        ("graphs and one-shot", [ROUNDED, SAME], "the log-probabilities differ between two runs"),
    ],
)
def test_what_is_wrong_is_noticed(way, results, problem, verdict):
    assert str(verdict(way, results)).startswith(problem)


def test_a_graph_has_the_bits_of_the_plain_way_and_other_sums_are_near(verdict):
    assert verdict("graphs", [SAME, SAME]) is None
    assert verdict("one-shot", [ROUNDED, ROUNDED]) is None


def test_a_way_that_is_not_faster_is_not_used(verdict):
    assert verdict("graphs", [SAME, SAME], seconds=1.99e-3) == "it takes 1.99 ms, and the plain way 2.00 ms"


@pytest.mark.slow
def test_a_decode_of_several_devices_gives_the_same_bits_twice(monkeypatch, quickly_compiled):
    monkeypatch.setattr(decode_self_test, "LAYERS", 1)
    run = decode_self_test.decode("graphs", SIZES)
    (tokens, logprobs), again = run(), run()
    assert tokens.shape == (decode_self_test.STEPS, decode_self_test.ROWS)
    assert np.all(tokens >= 0)
    assert np.all(logprobs < -1), "random weights know nothing"
    assert len(np.unique(logprobs)) > logprobs.size // 2
    assert logprobs.tobytes() == again[1].tobytes()


def test_the_plain_way_is_right_whatever_else_fails(monkeypatch, capsys):
    def fails(way, sizes):
        raise RuntimeError("INVALID_ARGUMENT: no such compile option")

    monkeypatch.setattr(decode_self_test, "decode", fails)
    tell_verdicts(msgspec.json.encode(SIZES).decode(), DecodeSizes, problem_of)
    lines = capsys.readouterr().out.splitlines()
    found = {each.implementation: each.problem for each in map(_read, lines)}
    assert found.pop("plain") is None
    assert found.keys() == WAYS.keys() - {"plain"}
    assert all("no such compile option" in str(problem) for problem in found.values())


def _read(line):
    return msgspec.json.decode(line, type=Verdict)


@pytest.mark.parametrize(
    "tp, processes, expected",
    [
        (1, 1, ["graphs", "plain"]),
        (8, 1, ["graphs and one-shot", "graphs", "one-shot", "plain"]),
        (8, 2, ["plain"]),
    ],
)
def test_ways_are_tried_where_one_process_has_all_devices(tp, processes, expected):
    assert ways_for(tp, processes) == expected


def test_the_plain_way_has_no_options():
    assert options_of("plain") == {}
    assert options_of("one-shot") == ONE_SHOT
