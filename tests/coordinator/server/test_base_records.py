import msgspec

from spmd_tx.config import ServerConfig
from spmd_tx.coordinator.server.base_records import keep_records, known_bases, read_record, write_record


def server(data_dir, name="student", group="main"):
    return ServerConfig(base_model=f"/models/{name}", served_model_name=name, data_dir=data_dir, group=group)


def keys(data_dir):
    return [base.key for base in known_bases(server(data_dir))]


def record(config):
    write_record(config, read_record(config))


def test_the_base_of_the_main_group_stays_the_first_one_under_another_name(tmp_path):
    record(server(tmp_path))
    assert read_record(server(tmp_path, "renamed")).key == "student"


def test_the_base_of_another_group_is_a_new_one_behind_the_first(tmp_path):
    record(server(tmp_path))
    record(server(tmp_path, "teacher", group="teacher"))
    assert keys(tmp_path) == ["student", "teacher"]
    assert read_record(server(tmp_path, "judge", group="teacher")).key == "judge"


def test_a_base_keeps_its_record_in_another_group(tmp_path):
    record(server(tmp_path))
    record(server(tmp_path, "teacher", group="teacher"))
    assert read_record(server(tmp_path, "teacher", group="main")).key == "teacher"
    assert read_record(server(tmp_path, "student", group="students")).key == "student"


def test_a_directory_of_an_earlier_version_keeps_its_base_when_others_come_beside_it(tmp_path):
    model = {"base_model": "/models/student", "architecture": "A", "sizes": {"n_layers": 2}}
    (tmp_path / "base_model.json").write_bytes(msgspec.json.encode(model))
    keep_records(server(tmp_path))
    record(server(tmp_path, "teacher", group="teacher"))
    assert keys(tmp_path) == ["student", "teacher"]
    kept = read_record(server(tmp_path)).model
    assert kept is not None
    assert kept.sizes == {"n_layers": 2}
