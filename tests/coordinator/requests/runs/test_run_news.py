import pytest

from spmd_tx.coordinator.requests.runs import run_news
from spmd_tx.coordinator.requests.runs.run_news import RunNews


@pytest.fixture
def now(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(run_news.time, "monotonic", lambda: now[0])
    return now


def test_news_is_told_once_and_then_not_before_some_seconds_are_over(now):
    news = RunNews()
    for run in ("one", "one", "two"):
        news.add(run)
    assert (news.tell(), news.told) == ({"one", "two"}, 1)
    news.add("three")
    now[0] += 0.5
    assert (news.tell(), news.told, news.seconds_left()) == (set(), 1, 1.5)
    now[0] += 1.5
    assert (news.tell(), news.told) == ({"three"}, 2)


def test_what_nobody_listens_to_is_bounded(monkeypatch):
    monkeypatch.setattr(run_news, "MOST_RUNS", 10)
    news = RunNews()
    for number in range(25):
        news.add(f"{number}")
    assert len(news.tell()) <= 10
