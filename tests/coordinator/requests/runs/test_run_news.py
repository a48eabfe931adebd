import pytest

from spmd_tx.coordinator.requests.runs import run_news
from spmd_tx.coordinator.requests.runs.run_news import RunNews


@pytest.fixture
def clock(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(run_news.time, "monotonic", lambda: now[0])
    return now


def test_all_listeners_are_told_the_same_at_most_every_two_seconds(clock):
    news = RunNews()
    news.add("one", 7)
    assert news.since(0) == {"one": 7}
    news.add("two")
    clock[0] += 0.5
    assert (news.since(1), news.seconds_left()) == ({}, 1.5)
    clock[0] += 1.5
    assert news.since(1) == {"two": None}
    assert news.since(1) == {"two": None}  # another listener
    assert news.since(news.told) == {}


def test_a_listener_who_was_away_gets_everything_with_the_earliest_steps(clock):
    news = RunNews()
    for step in (5, None, 3, 9):
        news.add("run", step)
        news.add(f"of step {step}")
        news.since(0)
        clock[0] += run_news.SECONDS
    found = news.since(0)
    assert found is not None
    assert found["run"] == 3
    assert len(found) == 5


def test_a_listener_who_was_away_for_too_long_is_told_so(clock):
    news = RunNews()
    for _ in range(run_news.KEPT):
        assert news.since(0) is not None
        clock[0] += run_news.SECONDS
    assert news.since(0) is None
    assert news.since(1) == {}


def test_what_nobody_listens_to_takes_bounded_memory(clock, monkeypatch):
    monkeypatch.setattr(run_news, "MOST_RUNS", 10)
    news = RunNews()
    for number in range(1000):
        news.add(f"{number}")
    assert len(news.since(0) or {}) <= 10
