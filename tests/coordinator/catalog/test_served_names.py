import pytest

from spmd_tx.config import ServerConfig
from spmd_tx.coordinator.catalog.served_names import ServedNames, tokenizer_id
from spmd_tx.errors import InvalidRequest

SERVED = ServedNames(("Qwen/Qwen3-8B", "default"), max_context=4096)


@pytest.mark.parametrize(
    "asked, answered",
    [
        ("Qwen/Qwen3-8B", "Qwen/Qwen3-8B"),
        ("default", "Qwen/Qwen3-8B"),
        ("Qwen/Qwen3-8B:peft:4096", "Qwen/Qwen3-8B:peft:4096"),
        ("default:peft:16", "Qwen/Qwen3-8B:peft:16"),
        ("Qwen/Qwen3-4B", None),
        ("Qwen/Qwen3-4B:peft:16", None),
        ("Qwen/Qwen3-8B:full:16", None),
        ("Qwen/Qwen3-8B:peft:", None),
        ("Qwen/Qwen3-8B:peft:+16", None),
        ("Qwen/Qwen3-8B:peft:1" + "0" * 5000, None),
        ("", None),
    ],
)
def test_a_model_has_several_names_and_variants_up_to_its_context(asked, answered):
    assert SERVED.find(asked) == answered


@pytest.mark.parametrize("tokens", [0, 4097])
def test_a_variant_beyond_the_context_is_refused(tokens):
    with pytest.raises(
        InvalidRequest, match=f":peft:{tokens}'; contexts have 1 to 4096 tokens here: ask for"
    ):
        SERVED.find(f"default:peft:{tokens}")


def test_another_model_is_refused_with_the_names_of_this_one():
    with pytest.raises(InvalidRequest, match="serves 'Qwen/Qwen3-8B' and 'default' only"):
        SERVED.need("gpt")


def test_names_are_separated_by_commas_and_the_first_is_that_of_answers():
    config = ServerConfig(base_model="/models/q", served_model_name="Qwen/Qwen3-8B, default")
    assert (config.model_name, config.model_names) == ("Qwen/Qwen3-8B", ("Qwen/Qwen3-8B", "default"))
    assert ServerConfig(base_model="a,b").model_names == ("a,b",)


def test_tokenizers_come_from_the_model_unless_its_repository_is_gated(tmp_path):
    assert tokenizer_id(str(tmp_path), tmp_path) == str(tmp_path)
    assert tokenizer_id("moonshotai/Kimi-K2-Thinking", tmp_path) == "moonshotai/Kimi-K2-Thinking"
    assert tokenizer_id("meta-llama/Llama-3.1-8B-Instruct", tmp_path).startswith("thinkingmachineslabinc/")
