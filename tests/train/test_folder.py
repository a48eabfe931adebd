import pytest

from spmd_tx.errors import StartError
from spmd_tx.train.folder import RunFolder, digest

SETTINGS = {"--rank": 8, "data": "abc"}


def test_a_run_goes_on_from_its_last_checkpoint(tmp_path):
    folder = RunFolder(tmp_path / "a" / "run", SETTINGS)
    assert (folder.place.step, folder.place.state) == (0, None)
    for step in range(3):
        folder.add_metrics(step, {"loss": 3.0 - step})
    folder.save(2, "tinker://run/weights/step-2")
    folder.add_metrics(3, {"loss": 0.0})
    with (folder.path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "lo')  # killed

    again = RunFolder(folder.path, SETTINGS)
    assert (again.place.step, again.place.state) == (2, "tinker://run/weights/step-2")
    again.add_metrics(2, {"loss": 9.0, "eval/loss": 1.0})
    assert again.curve("loss") == [3.0, 2.0, 9.0]
    again.add_metrics(2, {"loss": float("nan")})
    again.save(3, "tinker://run/weights/step-3")
    assert RunFolder(folder.path, SETTINGS).curve("loss") == again.curve("loss") == [3.0, 2.0, 9.0]
    again.save(2, "tinker://run/weights/step-2")
    assert RunFolder(folder.path, SETTINGS).curve("eval/loss") == []  # steps behind the checkpoint


def test_another_run_in_the_folder_is_an_error(tmp_path):
    RunFolder(tmp_path, SETTINGS).save(1, "tinker://run/weights/1")
    with pytest.raises(StartError, match="begun with --rank 8, and this command says 16; say the same"):
        RunFolder(tmp_path, {**SETTINGS, "--rank": 16})


def test_a_folder_that_cannot_be_used_is_an_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StartError, match=r"--out is .*file, which cannot be used"):
        RunFolder(tmp_path / "file", SETTINGS)
    (tmp_path / "place.json").write_text("{")
    with pytest.raises(StartError, match=r"place\.json is damaged"):
        RunFolder(tmp_path, SETTINGS)
    with pytest.raises(StartError, match=r"cannot read .*missing"):
        digest(tmp_path / "missing")
