"""The Helm chart, rendered by Helm itself."""

import json
import subprocess
from pathlib import Path

import pytest
import yaml

from tests.test_kubernetes_schemas import LAUNCH, check

PYTHON = Path(__file__).parents[2] / ".venv-helm" / "bin" / "python"
RENDER = Path(__file__).with_name("render_chart.py")
OTHER = {
    "image": "registry.lab/spmd-tx:2",
    "baseModel": "/data/my model: 1",
    "options": ["--max-lora-rank=64"],
    "nodes": 3,
    "gpus": 4,
    "cpu": 8,
    "memory": "96Gi",
    "ingress": "traefik",
    "data": {"size": "2Ti", "storageClass": "shared"},
    "database": {"size": "50Gi", "storageClass": "fast"},
}

pytestmark = [
    pytest.mark.container,
    pytest.mark.skipif(not PYTHON.exists(), reason="needs `make .venv-helm/installed`"),
]


def render(values: dict[str, object]) -> subprocess.CompletedProcess[str]:
    command = [str(PYTHON), str(RENDER), str(LAUNCH / "chart"), json.dumps(values)]
    return subprocess.run(command, capture_output=True, text=True)


def test_without_values_it_is_the_manifest():
    rendered = yaml.safe_load_all(render({}).stdout)
    assert list(rendered) == list(yaml.safe_load_all((LAUNCH / "k8s.yaml").read_text()))


def test_every_value_arrives():
    objects = list(yaml.safe_load_all(render(OTHER).stdout))
    assert [check(each) for each in objects] == [[]] * len(objects)
    named = {(each["kind"], each["metadata"]["name"]): each["spec"] for each in objects}
    head, workers = (named["StatefulSet", f"spmd-tx-{role}"] for role in ("head", "worker"))
    (first_key,) = head["template"]["spec"]["initContainers"]
    server, worker = (each["template"]["spec"]["containers"][0] for each in (head, workers))
    assert {each["image"] for each in (first_key, server, worker)} == {OTHER["image"]}
    assert server["args"][:2] == [f"--base-model={OTHER['baseModel']}", *OTHER["options"]]
    assert "--num-processes=3" in server["args"]
    assert (head["replicas"], workers["replicas"]) == (1, 2)
    for container in (server, worker):
        assert container["resources"]["requests"] == {"cpu": "8", "memory": "96Gi"}
        assert container["resources"]["limits"] == {"memory": "96Gi", "nvidia.com/gpu": 4}
    (database,) = head["volumeClaimTemplates"]
    for claim, wanted in (
        (named["PersistentVolumeClaim", "spmd-tx-data"], OTHER["data"]),
        (database["spec"], OTHER["database"]),
    ):
        assert claim["resources"]["requests"]["storage"] == wanted["size"]
        assert claim["storageClassName"] == wanted["storageClass"]
    source, _ = named["NetworkPolicy", "spmd-tx-api"]["ingress"][0]["from"]
    assert source["namespaceSelector"]["matchLabels"] == {"kubernetes.io/metadata.name": "traefik"}


@pytest.mark.parametrize("values", [{"basemodel": "m"}, {"nodes": 0}, {"options": ["max-lora-rank=64"]}])
def test_a_value_that_it_does_not_know_is_refused(values):
    refused = render(values)
    assert refused.returncode
    assert next(iter(values)) in refused.stderr
