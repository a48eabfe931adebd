async def test_a_key_tells_its_holder_what_it_is(client_for):
    alice = await client_for("alice", role="read-only")
    answer = (await alice.get("auth/apikey/me")).json()
    assert answer["details"]["user_details"] == {"email": "alice"}
    assert answer["key_id"] > 0
    assert f"alice {answer['key_id']:08x}" == answer["name"]
    assert answer["note"] == "read-only"


async def test_a_key_can_revoke_itself_and_no_other(client_for):
    alice, other = await client_for("alice"), await client_for("alice")
    assert (await alice.delete("auth/apikey/me")).status_code == 200
    refused = await alice.get("auth/apikey/me")
    assert refused.status_code == 401
    assert "was revoked" in refused.json()["detail"]
    (entry,) = [
        entry for entry in (await other.get("audit")).json()["entries"] if entry["event"] == "key_revoked"
    ]
    assert entry["event_details"]["actor"] == "alice"


async def test_without_keys_there_is_nothing_to_revoke(api):
    assert (await api.get("auth/apikey/me")).json()["key_id"] == 0
    refused = await api.delete("auth/apikey/me")
    assert refused.status_code == 400
    assert "no API keys" in refused.json()["detail"]
