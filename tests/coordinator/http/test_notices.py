from spmd_tx.coordinator.http.notices import HEADER, Notices


def test_a_session_is_told_once_that_a_formula_is_the_servers_own():
    notices = Notices()
    assert "docs/losses.md" in notices.of_training("a", "stable_reinforce")[HEADER]
    assert notices.of_training("a", "stable_reinforce") == {}
    assert notices.of_training("b", "stable_reinforce")


def test_other_losses_are_no_news():
    notices = Notices()
    assert notices.of_training("a", "ppo") == {}
    assert notices.of_training("a", "stable_reinforce")
