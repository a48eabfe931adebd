import httpx
import pytest

from tests.console import stand_in
from tests.console.driver import drive, needs_chromium

pytestmark = [pytest.mark.console, needs_chromium]


@pytest.mark.parametrize(
    "story",
    [
        "runs",
        "table",
        "run",
        "timing",
        "samples",
        "checkpoints",
        "trajectories",
        "playground",
        "server",
        "people",
        "not_found",
        "phone",
    ],
)
def test_a_page_works(story):
    with stand_in.serving() as address:
        drive(story, address)


def test_a_page_asks_for_a_key():
    with stand_in.serving(needs_key=True) as address:
        drive("sign_in", address)


def test_a_page_without_rights_asks_once():
    with stand_in.serving(has_rights=False) as address:
        drive("no_rights", address)


def test_ten_tabs_share_one_stream():
    with stand_in.serving() as address:
        drive("tabs", address)
        assert httpx.get(f"{address}/console/api/stream-count").json()["most"] == 1
