import pytest

from spmd_tx.models.adapter_formats.base_names import are_same, is_encoded_copy


@pytest.mark.parametrize(
    "named, served",
    [
        ("unsloth/qwen3-8b-unsloth-bnb-4bit", "Qwen/Qwen3-8B"),
        ("unsloth/Qwen3-8B-bnb-4bit", "Qwen/Qwen3-8B"),
        ("unsloth/Qwen3-8B", "Qwen/Qwen3-8B"),
        ("Qwen/Qwen3-8B-FP8", "Qwen/Qwen3-8B"),
        ("Qwen/Qwen3-8B", "/models/Qwen3-8B-FP8"),
        ("Qwen/Qwen2.5-7B-Instruct-GPTQ-Int4", "Qwen/Qwen2.5-7B-Instruct"),
        ("RedHatAI/Qwen3-8B-FP8-dynamic", "Qwen/Qwen3-8B"),
        ("unsloth/gpt-oss-20b-BF16", "openai/gpt-oss-20b"),
        ("unsloth/Meta-Llama-3.1-8B-Instruct-bnb-4bit", "meta-llama/Llama-3.1-8B-Instruct"),
        ("mlx-community/Qwen3-8B-4bit", "Qwen/Qwen3-8B"),
        (
            "/home/me/hub/models--Qwen--Qwen3-8B/snapshots/b968826d9c46dd6066d1",
            "Qwen/Qwen3-8B",
        ),
        (r"C:\models\Qwen3-8B", "Qwen/Qwen3-8B"),
        ("Qwen/Qwen3-8B/", "Qwen/Qwen3-8B:peft:32768"),
    ],
)
def test_names_of_one_model(named, served):
    assert are_same(named, served)


@pytest.mark.parametrize(
    "named, served",
    [
        ("Qwen/Qwen3-8B-Base", "Qwen/Qwen3-8B"),
        ("Qwen/Qwen3-4B-bnb-4bit", "Qwen/Qwen3-8B"),
        ("unsloth/Qwen3-8B-Base-unsloth-bnb-4bit", "Qwen/Qwen3-8B"),
        ("meta-llama/Llama-3.1-8B", "meta-llama/Llama-3.1-8B-Instruct"),
        ("/hub/models--Qwen--Qwen3-4B/snapshots/b968826d", "Qwen/Qwen3-8B"),
        ("bnb-4bit", "fp8"),
    ],
)
def test_names_of_two_models(named, served):
    assert not are_same(named, served)


@pytest.mark.parametrize("name", ["unsloth/Qwen3-8B-bnb-4bit", "Qwen/Qwen3-8B-AWQ", "a/b-GPTQ-Int8"])
def test_copies_that_are_not_read_are_known(name):
    assert is_encoded_copy(name)
    assert not is_encoded_copy("Qwen/Qwen3-8B-FP8")
