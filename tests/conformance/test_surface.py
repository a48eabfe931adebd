"""No method of the SDK and no command is without an entry, and the page shows what is entered."""

from collections import Counter

import tinker

from tests.conformance import surface, write_page
from tests.conformance.all_checks import entries


def entered() -> list[str]:
    return [name for entry in entries for name in entry.names]


def test_every_method_and_every_command_has_one_entry():
    offered = surface.methods() + surface.commands()
    assert not set(offered) - set(entered()), "the SDK has more than is entered"
    assert not set(entered()) - set(offered), "more is entered than the SDK has"
    assert max(Counter(entered()).values()) == 1


def test_the_walk_finds_what_users_call():
    offered = surface.methods()
    for name in ("TrainingClient.forward_backward_async", "SamplingClient.create", "ServiceClient.holder"):
        assert name in offered
    assert "tinker checkpoint push-hf" in surface.commands()
    assert len(offered) > 100


def test_the_future_of_a_client_has_all_of_its_methods():
    for future, client in surface.FORWARDING.items():
        assert surface.public_names(client) | surface.public_names(tinker.APIFuture) == surface.public_names(
            future
        )


def test_the_page_is_what_the_checks_say():
    assert write_page.PAGE.read_text() == write_page.page(), "run: python -m tests.conformance.write_page"
