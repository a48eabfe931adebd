"""Send the metrics of a tinker-cookbook recipe to the server as it writes them, for the console to show.

The recipe itself is not changed: give the folder of its log (``log_path``) and the ID of its training run.
"""

import argparse
import json
import math
import os
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote

PAUSE_SECONDS = 1.0  # between two looks at the file
MOST_METRICS = 256  # of one request


def main() -> None:
    options = parse_options()
    address = f"{options.base_url}/api/v1/training_runs/{quote(options.run, safe='')}/metrics"
    for line in new_lines(options.log_path / "metrics.jsonl"):
        logged = json.loads(line)
        step = logged.pop("step", None)
        numbers = {name: value for name, value in logged.items() if isinstance(value, (int, float))}
        names = sorted(name for name, value in numbers.items() if math.isfinite(value))
        for start in range(0, len(names), MOST_METRICS):
            send(address, step, {name: numbers[name] for name in names[start : start + MOST_METRICS]})


def new_lines(path: Path) -> Iterator[str]:
    """Give the lines of a file, and go on with those that are added, until Ctrl-C."""
    while not path.exists():
        time.sleep(PAUSE_SECONDS)
    with path.open() as file:
        unfinished = ""
        while True:
            unfinished += file.readline()
            if unfinished.endswith("\n"):
                yield unfinished
                unfinished = ""
            else:
                time.sleep(PAUSE_SECONDS)


def send(address: str, step: int | None, metrics: dict[str, float]) -> None:
    body = json.dumps({"step": step, "metrics": metrics}).encode()
    headers = {"Content-Type": "application/json", "X-Api-Key": os.environ.get("TINKER_API_KEY", "tml-local")}
    urllib.request.urlopen(urllib.request.Request(address, body, headers)).close()


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", help="as spmd-tx runs list shows it")
    parser.add_argument("log_path", type=Path, help="the recipe's log_path")
    parser.add_argument("--base-url", default=os.environ.get("TINKER_BASE_URL", "http://127.0.0.1:8000"))
    return parser.parse_args()


if __name__ == "__main__":
    main()
