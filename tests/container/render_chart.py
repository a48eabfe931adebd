"""Prints the objects of a Helm chart: render_chart.py CHART VALUES (JSON), by the Python of .venv-helm."""

import json
import sys

from helm_python import Chart  # pyright: ignore[reportMissingImports]

if __name__ == "__main__":
    with Chart.load(sys.argv[1]) as chart:
        rendered = chart.render(json.loads(sys.argv[2]), name="spmd-tx", namespace="lab")
    print(rendered["spmd-tx/templates/server.yaml"])
