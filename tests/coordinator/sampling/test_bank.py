from pathlib import Path

import pytest

from spmd_tx.coordinator.runtime.folder_names import folder_name
from spmd_tx.coordinator.sampling.bank import BASE_MODEL, UNPLACED, VersionBank
from spmd_tx.protocol.commands import AdapterSpec, Drop
from spmd_tx.protocol.places import Idle
from tests.support.moves import load_sampler, page_in, page_out, write_sampler

ADAPTER = AdapterSpec(rank=4)
FOLDER = Path("/versions")


@pytest.fixture
def bank():
    """Two slots that rows may use at once, and one for the next save."""
    return VersionBank(slots=4, directory=FOLDER)


def on_disk(bank, *names):
    for name in names:
        bank.register(name, ADAPTER, f"/checkpoints/{name}")


def start(bank, name):
    placement = bank.place(name)
    bank.pool.pin(placement.bank)
    return placement


def test_the_base_model_is_always_in_slot_0(bank):
    assert start(bank, BASE_MODEL).bank == 0


def test_a_version_on_disk_is_loaded_once(bank):
    on_disk(bank, "a")
    first = bank.place("a")
    assert first.before == [load_sampler(first.bank, "/checkpoints/a")]
    second = bank.place("a")
    assert (second.bank, second.before) == (first.bank, [])


def test_a_saved_version_is_on_the_device(bank):
    saved = bank.reserve("s", ADAPTER)
    assert saved.before == []
    assert (bank.place("s").bank, bank.place("s").before) == (saved.bank, [])


def test_a_version_without_a_slot_waits_with_the_workers_and_comes_back_from_there(bank):
    saved = bank.reserve("s", ADAPTER)
    on_disk(bank, "a", "b", "c")
    places = [bank.place(name) for name in ("a", "b", "c")]
    assert places[-1].bank == saved.bank
    out, load = places[-1].before
    assert out == page_out(saved.bank, bank.weights("s"))
    assert load.name == "load_sampler"

    back = bank.place("s")
    out, back_in = page_out(places[0].bank, bank.weights("a")), page_in(back.bank, bank.weights("s"))
    assert back.before == [out, back_in]
    assert bank.place("a").before[-1].name == "page_in", "its folder is read once"


def test_a_version_is_written_to_disk_once_from_wherever_it_is(bank):
    bank.reserve("s", ADAPTER)
    path = str(FOLDER / folder_name("s"))
    commands, folder = bank.write_out("s")
    assert commands == [write_sampler(bank.place("s").bank, path)]
    assert str(folder) == path

    on_disk(bank, "a", "b", "c")
    for name in ("a", "b", "c"):
        bank.place(name)
    commands, _ = bank.write_out("s")
    assert [command.name for command in commands] == ["page_out", "page_in", "write_sampler"]
    assert {command.step for command in bank.programs_to_write_out(["s"])} == {"write_sampler"}
    bank.note_folder("s", folder)
    assert bank.write_out("s") is None
    assert bank.programs_to_write_out(["s"]) == []
    assert bank.write_out("a") is None, "it has a folder from the beginning"


def test_the_workers_forget_what_they_keep_of_a_forgotten_version(bank):
    bank.reserve("s", ADAPTER)
    weights = bank.weights("s")
    on_disk(bank, "a", "b", "c")
    for name in ("a", "b", "c"):
        bank.place(name)
    bank.forget("a")  # it has a slot
    assert bank.take_dropped() == []
    bank.reserve("s", ADAPTER)
    assert bank.take_dropped() == [Drop(places=[Idle(weights)])]
    assert bank.take_dropped() == []
    assert bank.weights("s") != weights


def test_the_least_recently_used_version_leaves(bank):
    on_disk(bank, "a", "b", "c", "d")
    places = {name: bank.place(name).bank for name in ("a", "b", "c")}
    bank.place("a")
    assert bank.place("d").bank == places["b"]


def test_rows_keep_their_version_on_the_device(bank):
    on_disk(bank, "a", "b", "c", "d")
    pinned = start(bank, "a").bank
    assert all(bank.place(name).bank != pinned for name in ("b", "c", "d", "b"))


def test_a_save_finds_a_slot_however_many_rows_run(bank):
    on_disk(bank, "a", "b", "c")
    used = {start(bank, "a").bank, start(bank, "b").bank}
    assert bank.place("c").bank == -1
    for count in range(3):
        assert bank.reserve(f"save-{count}", ADAPTER).bank not in {-1, *used}


def test_the_version_in_use_for_longest_makes_room_for_one_that_waits(bank):
    on_disk(bank, "a", "b", "c")
    a, b = start(bank, "a").bank, start(bank, "b").bank
    assert bank.place("c").bank == -1
    assert bank.place("a").bank == -1, "a takes no new rows in this round"
    assert bank.place("b").bank == b
    bank.pool.unpin(a)
    assert bank.place("c").bank >= 0
    bank.pool.new_round()
    assert bank.place("a").bank >= 0


def test_a_new_save_under_an_old_name_leaves_running_rows_alone(bank):
    first = bank.reserve("s", ADAPTER).bank
    bank.pool.pin(first)
    second = bank.reserve("s", ADAPTER).bank
    assert second != first
    assert bank.place("s").bank == second
    assert bank.reserve("t", ADAPTER).bank != first


def test_forgotten_versions_leave_their_slot_and_their_written_out_folder(bank):
    bank.reserve("s", ADAPTER)
    bank.note_folder("s", FOLDER / folder_name("s"))
    on_disk(bank, "a", "b", "c")
    for name in ("a", "b", "c"):
        bank.place(name)
    bank.forget("s")
    bank.forget("a")
    assert bank.take_abandoned() == [FOLDER / folder_name("s")], (
        "a checkpoint's own folder is not the bank's to delete"
    )
    assert bank.take_abandoned() == []
    assert not bank.knows("s")


@pytest.fixture
def models():
    """Copies of a whole model: the base model's, and two more."""
    return VersionBank(slots=3, directory=FOLDER, whole_models=True)


def test_rows_use_one_copy_of_a_model_at_a_time_and_take_turns(models):
    on_disk(models, "a")
    base = start(models, BASE_MODEL)
    assert start(models, BASE_MODEL).bank == base.bank == 0
    assert models.place("a").bank == UNPLACED
    assert models.place(BASE_MODEL).bank == UNPLACED  # it ends first, now that another one waits
    models.pool.unpin(0)
    models.pool.unpin(0)
    models.pool.new_round()
    of_a = start(models, "a")
    assert of_a.bank not in (0, UNPLACED)
    assert models.place(BASE_MODEL).bank == UNPLACED
    models.pool.unpin(of_a.bank)
    models.pool.new_round()
    assert models.place(BASE_MODEL).bank == 0


def test_a_copy_that_no_request_waits_for_is_forgotten_with_its_slot(models):
    places = [models.reserve(name, ADAPTER) for name in ("a", "b")]
    assert [each.before for each in places] == [[], []]
    models.hold("b")
    assert models.reserve("c", ADAPTER).before == []
    assert not models.knows("a")
    weights = models.weights("b")
    assert models.reserve("d", ADAPTER).before == [page_out(places[1].bank, weights)]
    assert models.knows("b")
    assert not models.knows("a")


def test_a_copy_with_a_folder_is_read_from_it_again(models):
    models.reserve("a", ADAPTER)
    models.register("a", ADAPTER, "/checkpoints/a")
    models.reserve("b", ADAPTER)
    assert models.reserve("c", ADAPTER).before == []
    again = models.place("a")
    assert again.before == [load_sampler(again.bank, "/checkpoints/a")]
