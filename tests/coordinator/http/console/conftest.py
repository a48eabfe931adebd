import pytest

from spmd_tx.coordinator.http import shared_answers


@pytest.fixture(autouse=True)
def nothing_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Answer anew each time, as tests look at what has changed a moment ago."""
    monkeypatch.setattr(shared_answers, "COSTLY_TIMES", 0)
