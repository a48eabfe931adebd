async def test_a_key_tells_whose_it_is(client_for):
    alice, root = await client_for("alice"), await client_for("root", role="admin")
    mine, theirs = [(await client.get("auth/apikey/me")).json() for client in (alice, root)]
    assert mine["name"] == "alice"
    assert "role user" in mine["note"]
    assert mine["details"] == {"org_details": {"name": "spmd_tx"}, "user_details": {"email": "alice"}}
    assert "role admin" in theirs["note"]
    assert isinstance(mine["key_id"], int)
    assert mine["key_id"] != theirs["key_id"]


async def test_a_key_can_end_itself_and_no_other(client_for):
    first, second, bob = [await client_for(owner) for owner in ("alice", "alice", "bob")]
    assert (await first.delete("auth/apikey/me")).status_code == 200
    refused = await first.get("sessions")
    assert refused.status_code == 401
    assert "was revoked" in refused.json()["detail"]
    assert [(await client.get("sessions")).status_code for client in (second, bob)] == [200, 200]


async def test_without_keys_there_is_none_to_delete(api):
    assert (await api.get("auth/apikey/me")).json()["key_id"] == 0
    refused = await api.delete("auth/apikey/me")
    assert refused.status_code == 400
    assert "no API keys" in refused.json()["detail"]
