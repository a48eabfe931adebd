from spmd_tx.coordinator.wire.page_room import PageRoom


def test_a_page_takes_entries_until_its_bytes_are_reached():
    room = PageRoom(10)
    assert [room.takes(entry) for entry in ("1234", "12", "1", "")] == [True, True, False, False]


def test_the_first_entry_always_fits_so_that_pages_lead_on():
    room = PageRoom(10)
    assert room.takes("x" * 100)
    assert not room.takes("")
