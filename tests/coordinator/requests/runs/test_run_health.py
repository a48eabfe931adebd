import pytest

from spmd_tx.coordinator.requests.runs.run_health import OpenRun, of_ended, of_open, without_loss

AT_WORK = OpenRun(
    unheard=3.0, idle=60.0, workers=None, is_waiting=False, has_requests=True, reason=None, failed=0
)
WITHOUT = AT_WORK._replace(has_requests=False, is_waiting=True)


@pytest.mark.parametrize(
    ("run", "state", "words"),
    [
        (AT_WORK, "running", None),
        (
            AT_WORK._replace(is_waiting=True, reason="2 micro-batches ready"),
            "waiting",
            "2 micro-batches ready",
        ),
        (AT_WORK._replace(is_waiting=True), "running", None),
        (AT_WORK._replace(reason="of a request that was sent"), "running", None),
        (AT_WORK._replace(workers="loading weights"), "waiting", "do not run commands: loading weights"),
        (WITHOUT, "waiting", "has asked for nothing for 60 s"),
        (WITHOUT._replace(workers="loading weights"), "waiting", "has asked for nothing"),
        (WITHOUT._replace(idle=2.0), "running", None),
        (AT_WORK._replace(unheard=14.2), "silent", "no heartbeat for 14 s"),
        (WITHOUT._replace(unheard=12.0, idle=0.0), "silent", "no heartbeat for 12 s"),
    ],
)
def test_an_open_run_says_what_it_waits_for(run, state, words):
    found = of_open(run._replace(failed=2))
    assert (found.state, found.failed) == (state, 2)
    assert found.reason is None if words is None else words in (found.reason or "")


@pytest.mark.parametrize(
    ("run", "state", "reason"),
    [
        (("success", None, "its client finished: success"), "finished", None),
        (("errored", "KeyError: 'x'", "its client finished: errored"), "errored", "KeyError: 'x'"),
        (("interrupted", None, "its client finished: interrupted"), "interrupted", None),
        (
            (None, None, "its client was silent for 1800 seconds"),
            "interrupted",
            "its client was silent for 1800 seconds",
        ),
    ],
)
def test_a_run_that_has_ended_says_how(run, state, reason):
    found = of_ended(*run)
    assert (found.state, found.reason) == (state, reason)


def test_a_client_that_has_gone_without_a_word_and_without_a_loss_has_left():
    found = without_loss(of_open(WITHOUT._replace(unheard=14.2, failed=1)))
    assert (found.state, found.reason, found.failed) == (
        "left",
        "no heartbeat for 14 s, all steps are saved",
        1,
    )
