"""A body is parsed at once, so it is as large as what its route is for."""

import pytest

from spmd_tx.bounds import Bounds

MIB = 1 << 20


@pytest.mark.parametrize(
    "path, most",
    [
        ("create_session", Bounds().plain_body_bytes),
        ("optim_step", Bounds().plain_body_bytes),
        ("save_weights", Bounds().plain_body_bytes),
        ("create_custom_loss", Bounds().plain_body_bytes),
        ("sessions/search", Bounds().reading_body_bytes),
        ("asample", Bounds().prompt_body_bytes),
        ("/oai/api/v1/completions", Bounds().prompt_body_bytes),
        ("/oai/api/v1/chat/completions", Bounds().prompt_body_bytes),
        ("/oai/api/v1/responses", Bounds().prompt_body_bytes),
        ("/anthropic/api/v1/messages", Bounds().prompt_body_bytes),
        ("/anthropic/api/v1/messages/count_tokens", Bounds().prompt_body_bytes),
        ("forward", 64 * MIB),
        ("forward_backward", 64 * MIB),
    ],
)
async def test_a_body_is_as_large_as_its_route_needs(api, path, most):
    path = str(api.base_url.join(path))
    headers = {"content-type": "application/json"}
    assert (await api.post(path, content=b" " * (most + 1), headers=headers)).status_code == 413
    assert (await api.post(path, content=b" " * most, headers=headers)).status_code == 400
