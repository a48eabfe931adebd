import json
import os
import sys
from pathlib import Path

import pytest

from spmd_tx.cli.script_logs import JsonLines, LoggedStep, named_folders, open_logs


def test_lines_are_read_once_and_only_when_they_are_whole(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1, "old": 1}\n')
    log = JsonLines(path, path.stat().st_size)
    with path.open("a") as file:
        file.write('{"step": 2, "reward": 0.5}\nno json\n[1]\n{"loss": 1}\n{"step": 3, "rew')
    assert log.news() == [LoggedStep(2, {"reward": 0.5}), LoggedStep(None, {"loss": 1})]
    assert log.news() == []
    with path.open("a") as file:
        file.write('ard": 1}\n')
    assert log.news() == [LoggedStep(3, {"reward": 1})]


def test_metrics_are_the_finite_numbers_also_of_inner_tables():
    values = json.loads(
        '{"a": 1, "b": {"c": 2.5, "d": {"e": 3}}, "text": "x", "flag": true, "nan": NaN, "inf": Infinity}'
    )
    values |= {"huge": 10**400, "_runtime": 5, "list": [1]}
    assert LoggedStep(None, values).metrics() == {"a": 1.0, "b/c": 2.5, "b/d/e": 3.0}


@pytest.mark.parametrize(
    "argument, folder",
    [("log_path=/a/b", "/a/b"), ("--log-dir=c", "c"), ("catalog_path=x", None), ("--log_path", None)],
)
def test_the_folder_that_a_command_names(argument, folder):
    assert named_folders(["python", argument]) == ([] if folder is None else [Path(folder)])


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells which files are open")
def test_logs_that_a_process_has_open(tmp_path):
    names = ("logs.log", "run-1.wandb", "other.log")
    folders = [tmp_path / str(number) for number in range(3)]
    for folder in folders:
        folder.mkdir()
    files = [(folder / name).open("w") for folder, name in zip(folders, names, strict=True)]
    try:
        found = {path for path in open_logs(os.getpid()) if tmp_path in path.parents}
    finally:
        for file in files:
            file.close()
    assert found == {folders[0] / "metrics.jsonl", folders[1] / "run-1.wandb"}
