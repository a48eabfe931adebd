from urllib.parse import urlsplit

import pytest
from tinker.lib import console_urls

RUN = "8e2e4a4c-1d6e-4f0b-9a63-4a5b6c7d8e9f:train:0"


@pytest.mark.parametrize(
    "built, page",
    [
        (console_urls.training_run_console_url(RUN), f"/console/runs/{RUN}"),
        (console_urls.sessions_console_url(), "/console"),
        (console_urls.session_console_url(RUN.partition(":")[0]), "/console"),
        (console_urls.checkpoint_console_url(RUN, "weights/step-100"), "/console/checkpoints"),
        (
            console_urls.checkpoint_playground_url(f"tinker://{RUN}/sampler_weights/a"),
            f"/console/playground?model=tinker%3A%2F%2F{RUN.replace(':', '%3A')}%2Fsampler_weights%2Fa",
        ),
    ],
)
async def test_addresses_that_the_sdk_builds_lead_to_pages_of_the_console(client_for, built, page):
    client = await client_for("alice")
    del client.headers["x-api-key"]
    assert built.startswith(console_urls._CONSOLE_BASE_URL)  # which docs/console.md replaces
    address = urlsplit(built)
    answer = await client.get(f"http://server{address.path}?{address.query}")
    assert answer.is_redirect
    assert answer.headers["location"] == page


async def test_a_link_leads_to_no_other_site(client_for):
    client = await client_for("alice")
    answer = await client.get("http://server/training_runs/%2F%2Fexample.com")
    assert answer.headers.get("location", "/").startswith("/console/") or answer.status_code == 404
