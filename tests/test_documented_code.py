"""The Python, TOML, YAML and JSON in the documentation is what it seems, and names what there is."""

import ast
import importlib
import inspect
import json
import tomllib
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
import tinker
import yaml
from tinker import types
from tinker.lib.public_interfaces.rest_client import RestClient

from spmd_tx.bounds import Bounds
from spmd_tx.config import ServerConfig
from tests.support.pages import PAGES, Block, blocks

# What the variables of the guides hold.
CLIENTS = {
    "service": tinker.ServiceClient,
    "trainer": tinker.TrainingClient,
    "training": tinker.TrainingClient,
    "sampler": tinker.SamplingClient,
    "rest": RestClient,
    "types": types,
    "tinker": tinker,
}


def blocks_in(*languages: str) -> Any:
    """Parametrize a test with the blocks of all pages in one of the languages."""
    found = [(page.stem, block) for page in PAGES for block in blocks(page) if block.language in languages]
    assert found
    return pytest.mark.parametrize("block", [block for _, block in found], ids=[name for name, _ in found])


@blocks_in("python")
def test_python_compiles_and_imports_what_there_is(block: Block):
    for node in ast.walk(ast.parse(block.text)):
        if isinstance(node, ast.Import):
            for name in node.names:
                importlib.import_module(name.name)
        elif isinstance(node, ast.ImportFrom):
            module = importlib.import_module(node.module or "")
            assert [name.name for name in node.names if not hasattr(module, name.name)] == []


@blocks_in("python")
def test_python_calls_the_sdk_with_arguments_that_it_takes(block: Block):
    for client, call in calls(block.text):
        assert isinstance(call.func, ast.Attribute)
        function = getattr(CLIENTS[client], call.func.attr)
        signature = inspect.signature(function)
        is_method = inspect.isclass(CLIENTS[client])
        arguments = [None] * (len(call.args) + is_method)
        signature.bind(*arguments, **{str(word.arg): None for word in call.keywords if word.arg})


def calls(source: str) -> Iterator[tuple[str, ast.Call]]:
    """The calls of methods of what ``CLIENTS`` names."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            receiver = node.func.value
            if isinstance(receiver, ast.Name) and receiver.id in CLIENTS:
                yield receiver.id, node


@blocks_in("toml")
def test_configuration_sets_options_that_there_are(block: Block):
    options = tomllib.loads(block.text)
    limits = options.pop("limits", {})
    assert limits.keys() <= {field.name for field in msgspec.structs.fields(Bounds)}
    assert options.keys() <= {field.name for field in msgspec.structs.fields(ServerConfig)}


@blocks_in("yaml", "json")
def test_configuration_of_others_can_be_read(block: Block):
    read = json.loads if block.language == "json" else yaml.safe_load
    assert read(block.text)


@pytest.mark.parametrize(
    "wrong",
    [
        "trainer.forward_backward(data)",
        "trainer.forward_backwards(data, 'cross_entropy')",
        "sampler.sample(prompt, 1, params, tokens=3)",
        "types.AdamParam(learning_rate=1e-4)",
        "service.create_lora_training_client('m', ranks=3)",
    ],
)
def test_a_wrong_call_is_found(wrong):
    with pytest.raises((AttributeError, TypeError)):
        test_python_calls_the_sdk_with_arguments_that_it_takes(Block("python", wrong))
