"""The objects of launch/ in the models that are generated from Kubernetes' OpenAPI document."""

from collections.abc import Iterator, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml

LAUNCH = Path(__file__).parents[1] / "launch"
OBJECTS = [
    pytest.param(each, id=f"{file.name} {each['kind']} {each['metadata']['name']}")
    for file in sorted(LAUNCH.glob("k8s*.yaml"))
    for each in yaml.safe_load_all(file.read_text())
]


def model_of(given: Mapping[str, Any]) -> Any:
    """The class of an object: its apiVersion, as ``networking.k8s.io/v1``, names the module."""
    group, _, version = given["apiVersion"].rpartition("/")
    module = f"lightkube.models.{group.partition('.')[0] or 'core'}_{version}"
    return getattr(import_module(module), given["kind"])


def unknown(given: Any, read: Any, path: str = "") -> Iterator[str]:
    """Yield the paths of all that the models have not read."""
    if isinstance(given, Mapping):
        for key, value in given.items():
            if key not in read:
                yield f"{path}.{key}"
            else:
                yield from unknown(value, read[key], f"{path}.{key}")
    elif isinstance(given, list):
        for at, (value, other) in enumerate(zip(given, read, strict=True)):
            yield from unknown(value, other, f"{path}[{at}]")


def check(given: Mapping[str, Any]) -> list[str]:
    """Read an object, and name unknown fields. Raises msgspec.ValidationError for wrong or missing values."""
    return list(unknown(given, msgspec.to_builtins(msgspec.convert(given, model_of(given)))))


@pytest.mark.parametrize("given", OBJECTS)
def test_every_object_has_the_fields_and_types_of_its_kind(given):
    assert check(given) == []


@pytest.mark.parametrize(
    "right, wrong, told",
    [
        ("periodSeconds: 10", "periodSecond: 10", "containers[0].startupProbe.periodSecond"),
        ("periodSeconds: 10", "periodSeconds: ten", "Expected `int | null`, got `str`"),
        ("{memory: 256Gi, nvidia.com/gpu: 8}", "[256Gi]", "Expected `object | null`, got `array`"),
        ("containerPort: 8471", "hostPort: 8471", "missing required field `containerPort`"),
    ],
)
def test_a_mistake_is_named(right, wrong, told):
    text = (LAUNCH / "k8s.yaml").read_text()
    assert right in text
    heads = [
        each for each in yaml.safe_load_all(text.replace(right, wrong, 1)) if each["kind"] == "StatefulSet"
    ]
    try:
        said = " ".join(check(heads[0]))
    except msgspec.ValidationError as error:
        said = str(error)
    assert told in said
