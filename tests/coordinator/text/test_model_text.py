import json
import subprocess
import sys

import pytest

from spmd_tx.coordinator.text import call_syntaxes
from spmd_tx.coordinator.text.model_text import LazyModelText, load_model_text
from spmd_tx.coordinator.text.reply_formats import THINK
from spmd_tx.demo import tiny_model
from spmd_tx.errors import InvalidRequest, StartError
from tests.support import reply_templates

HELLO = [{"role": "user", "content": "Hello"}]


@pytest.fixture
def directory(tmp_path):
    return tiny_model.write(tmp_path / "model")


def change(directory, name, **values):
    raw = json.loads((directory / name).read_text()) | values
    (directory / name).write_text(json.dumps({key: value for key, value in raw.items() if value != "absent"}))


def render(directory, **options):
    return load_model_text(directory).template.render(HELLO, options, 1000, 10.0)


@pytest.mark.parametrize(
    "generation, config, ids",
    [
        ([511, 509], 1, (511, 509)),
        (7, 1, (7,)),
        (0, 1, (0,)),
        ("absent", 1, (1,)),
        ("absent", [1, 2], (1, 2)),
        (None, [1, 2], (1, 2)),
        ([], [1, 2], (1, 2)),
        ([], [], (511,)),
    ],
)
def test_the_end_of_text_is_that_of_the_generation_config(directory, generation, config, ids):
    change(directory, "generation_config.json", eos_token_id=generation)
    change(directory, "config.json", eos_token_id=config)
    assert load_model_text(directory).eos_token_ids == ids


def test_what_else_a_generation_config_says_keeps_no_server_from_starting(directory):
    change(directory, "generation_config.json", eos_token_id=7, max_new_tokens=-1, temperature="warm")
    assert load_model_text(directory).eos_token_ids == (7,)


@pytest.mark.parametrize("name", ["generation_config.json", "config.json"])
def test_a_config_that_is_no_object_is_named(directory, name):
    change(directory, "generation_config.json", eos_token_id="absent")
    (directory / name).write_text("[]")
    with pytest.raises(StartError, match=f"{name} holds no JSON object"):
        load_model_text(directory)


@pytest.mark.parametrize("has_generation_config", [True, False])
@pytest.mark.parametrize(
    "outer, inner, token, ids",
    [
        (1, 2, "<|im_end|>", (1,)),
        ("absent", 2, "<|im_end|>", (2,)),
        (None, [2, 0], "<|im_end|>", (2, 0)),
        ("absent", "absent", "<|im_end|>", (511,)),
        ("absent", None, {"__type": "AddedToken", "content": "<|im_start|>", "special": True}, (510,)),
        ("absent", "absent", "absent", ()),
    ],
)
def test_the_end_of_text_is_found_wherever_a_model_says_it(
    directory, has_generation_config, outer, inner, token, ids
):
    """In the order of transformers: the outer config, the part about text, and at last the tokenizer."""
    text = {} if inner == "absent" else {"eos_token_id": inner}
    change(directory, "config.json", eos_token_id=outer, text_config=text)
    change(directory, "tokenizer_config.json", eos_token=token)
    if has_generation_config:
        change(directory, "generation_config.json", eos_token_id="absent")
    else:
        (directory / "generation_config.json").unlink()
    assert load_model_text(directory).eos_token_ids == ids


def test_the_end_of_text_is_the_number_of_a_token(directory):
    for ids in ("x", True, -1, [1, None], 2**31):
        change(directory, "generation_config.json", eos_token_id=ids)
        with pytest.raises(StartError, match=r"eos_token_id is .*, which must be the number of a token"):
            load_model_text(directory)


def test_a_generation_config_may_be_missing(directory):
    (directory / "generation_config.json").unlink()
    change(directory, "config.json", eos_token_id=3)
    assert load_model_text(directory).eos_token_ids == (3,)


def test_the_template_is_found_where_models_have_it(directory):
    (directory / "chat_template.jinja").unlink()
    hello, tools = "{{ messages[0].content }}", "{{ tools }}"
    named = [
        {"name": "tool_use", "template": hello + " from tools " + tools},
        {"name": "default", "template": hello + " from a list"},
    ]
    change(directory, "tokenizer_config.json", chat_template=hello + "{{ eos_token }}", eos_token="</s>")
    assert render(directory) == "Hello</s>"
    change(directory, "tokenizer_config.json", chat_template=named)
    assert render(directory) == "Hello from a list"
    assert render(directory, tools=[{}]) == "Hello from tools [{}]"
    (directory / "chat_template.jinja").write_text(hello + " from a file, which goes first")
    assert render(directory) == "Hello from a file, which goes first"
    (directory / "additional_chat_templates").mkdir()
    (directory / "additional_chat_templates" / "tool_use.jinja").write_text(hello + " from a folder " + tools)
    assert render(directory) == "Hello from a file, which goes first"
    assert render(directory, tools=[{}]) == "Hello from a folder [{}]"


def test_a_template_may_be_that_of_the_processor(directory):
    (directory / "chat_template.jinja").unlink()
    change(directory, "tokenizer_config.json", chat_template="absent")
    hello = "{{ messages[0]['content'] }} of the "
    (directory / "chat_template.json").write_text(json.dumps({"chat_template": f"{hello}processor"}))
    assert render(directory) == "Hello of the processor"
    change(directory, "tokenizer_config.json", chat_template=f"{hello}tokenizer")
    assert render(directory) == "Hello of the tokenizer"


def test_the_processor_may_have_several_templates_or_none(directory):
    (directory / "chat_template.jinja").unlink()
    change(directory, "tokenizer_config.json", chat_template="absent")
    hello = "{{ messages[0]['content'] }}"
    several = [
        {"name": "default", "template": hello},
        {"name": "tool_use", "template": hello + "{{ tools }}"},
    ]
    (directory / "chat_template.json").write_text(json.dumps({"chat_template": several}))
    assert (render(directory), render(directory, tools=[{}])) == ("Hello", "Hello[{}]")
    (directory / "chat_template.json").write_text("{}")
    with pytest.raises(InvalidRequest, match="this model has no chat template"):
        render(directory)


def test_the_format_of_answers_is_that_of_the_template(directory):
    (directory / "chat_template.jinja").write_text("{{ messages[0]['content'] }}")
    assert load_model_text(directory).reply_format is None
    change(directory, "generation_config.json", eos_token_id=[0, 511])
    (directory / "chat_template.jinja").write_text(reply_templates.QWEN3)
    text = load_model_text(directory)
    assert text.reply_format is not None
    assert (text.reply_format.calls, text.reply_format.reasoning) == (call_syntaxes.HERMES, THINK)
    assert set(text.reply_format.ends) >= {text.tokenizer.id_to_token(511), "<|im_end|>"}
    assert text.template_traits.reasoning_key == "reasoning_content"


def test_a_tokenizer_is_enough(directory):
    for name in ("config.json", "generation_config.json", "tokenizer_config.json", "chat_template.jinja"):
        (directory / name).unlink()
    text = load_model_text(directory)
    assert text.tokenizer.encode("hello").ids
    assert text.eos_token_ids == ()


@pytest.mark.parametrize("content", ["{", "{}", "[]"])
@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "generation_config.json"])
def test_damaged_files_are_refused_with_their_place(directory, name, content):
    (directory / name).write_text(content)
    if (name, content) in [("tokenizer_config.json", "{}"), ("generation_config.json", "{}")]:
        load_model_text(directory)
        return
    with pytest.raises(StartError, match=rf"cannot read .*{directory}.*restore"):
        load_model_text(directory)


def test_code_of_a_model_is_not_run(directory):
    (directory / "code.py").write_text(f"open({str(directory / 'was-run')!r}, 'w')")
    auto_map = {"AutoTokenizer": ["code.Tokenizer", "code.Tokenizer"], "AutoConfig": "code.Config"}
    change(directory, "tokenizer_config.json", auto_map=auto_map, tokenizer_class="Tokenizer")
    change(directory, "config.json", auto_map=auto_map)
    assert render(directory)
    assert not (directory / "was-run").exists()


async def test_a_text_is_loaded_once_and_a_failure_is_told_to_everybody():
    loads = []
    text = LazyModelText(lambda: loads.append(1) or "loaded")
    assert (await text.get(), await text.get(), text.loaded) == ("loaded", "loaded", "loaded")
    assert loads == [1]

    def fail():
        raise StartError("no such model")

    text = LazyModelText(fail)
    for _ in range(2):
        with pytest.raises(StartError, match="no such model"):
            await text.get()


LOAD = """
import sys
from pathlib import Path
import spmd_tx.coordinator.server.serve
early = [name for name in sys.modules if name.split(".")[0] in ("transformers", "huggingface_hub")]
from spmd_tx.coordinator.text import call_syntaxes
from spmd_tx.coordinator.text.model_text import load_model_text
text = load_model_text(Path(sys.argv[1]))
text.template.render([{"role": "user", "content": "Hello"}], {}, 1000, 10.0)
late = [name for name in ("jax", "jaxlib", "flax", "torch", "tensorflow") if name in sys.modules]
print(early, late, "transformers" in sys.modules)
"""


def test_the_coordinator_imports_transformers_and_the_hub_late_and_no_framework(directory, tmp_path):
    """Even if PyTorch is installed: a package that says so and cannot be imported stands in for it."""
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("raise SystemExit('PyTorch is imported')")
    (tmp_path / "torch-2.9.0.dist-info").mkdir()
    (tmp_path / "torch-2.9.0.dist-info" / "METADATA").write_text("Name: torch\nVersion: 2.9.0\n")
    command = [sys.executable, "-c", LOAD, str(directory)]
    env = {"PYTHONPATH": f"{tmp_path}:."}
    found = subprocess.run(command, capture_output=True, text=True, env=env)
    assert found.stdout.strip() == "[] [] True", found.stderr
    assert "PyTorch" not in found.stderr
