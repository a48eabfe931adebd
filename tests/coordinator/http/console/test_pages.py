import pytest

SERVER = "http://server"


@pytest.mark.parametrize("path", ["/console", "/console/runs/s:train:0"])
async def test_every_page_is_the_application_and_needs_no_key(client_for, path):
    client = await client_for("alice")
    del client.headers["x-api-key"]
    answer = await client.get(SERVER + path)
    assert answer.status_code == 200
    assert answer.headers["content-type"].startswith("text/html")
    assert "default-src 'self'" in answer.headers["content-security-policy"]
    assert answer.headers["cache-control"] == "no-cache"
    assert "/console/assets/console.js" in answer.text


@pytest.mark.parametrize(
    "name, kind",
    [
        ("console.js", "text/javascript"),
        ("console.css", "text/css"),
        ("icon.svg", "image/svg+xml"),
        ("stream_worker.js", "text/javascript"),
    ],
)
async def test_its_files_have_their_types(api, name, kind):
    answer = await api.get(f"{SERVER}/console/assets/{name}")
    assert (answer.status_code, answer.headers["content-type"].partition(";")[0]) == (200, kind)


@pytest.mark.parametrize("path", ["/console/assets/none.js", "/console/api/none"])
async def test_nothing_else_is_served(api, path):
    assert (await api.get(SERVER + path)).status_code in (404, 405)


async def test_the_servers_address_leads_to_the_console(client_for):
    client = await client_for("alice")
    del client.headers["x-api-key"]
    answer = await client.get(f"{SERVER}/")
    assert (answer.status_code, answer.headers["location"]) == (302, "/console")
