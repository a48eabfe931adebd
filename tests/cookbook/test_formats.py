"""A trained adapter has our log-probabilities in every form in which it is written, wherever it is loaded."""

import json
from pathlib import Path

import msgspec
import numpy as np
import pytest
import tinker
from tinker import types

from spmd_tx.cli.import_weights import lora_config
from spmd_tx.coordinator.checkpoints.foreign_adapter import convert
from spmd_tx.coordinator.wire.checkpoint_paths import parse
from spmd_tx.demo import tiny_model
from spmd_tx.errors import InvalidRequest
from spmd_tx.exports.adapter_formats import export_adapter
from spmd_tx.exports.merged import export_merged
from spmd_tx.models.config import read_model_config
from spmd_tx.models.declared.model import EXPERT_LORA
from spmd_tx.protocol.commands import AdapterSpec
from spmd_tx.sharding.mesh import make_mesh
from tests.cookbook.cookbook import HERE, PYTHON, run_python
from tests.golden import families
from tests.sdk.examples import CONTEXT, SECONDS, VOCABULARY, batch, random_tokens, train
from tests.sdk.server import BASE_MODEL, serving
from tests.support.family_logits import logits

pytestmark = [
    pytest.mark.cookbook,
    pytest.mark.timeout(900),
    # The SDK leaves sockets open when its client is closed.
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]

RANK, STEPS, STEP = 8, 3, types.AdamParams(learning_rate=0.02)
CLOSE, CLOSE_OF_ALL = 1e-4, 5e-4  # nats: of the tokens of a text, and of all tokens at each of its places
EXPERTS = ("deepseek_v3", "glm4_moe", "glm4_moe_lite", "gpt_oss", "qwen3_5_moe")
LAYOUTS = [(family, "shared-outer") for family in families.CONFIGS if family != "qwen3_moe"]
LAYOUTS += [(family, "per-expert") for family in EXPERTS]
LAYOUTS += [("qwen3_moe", layout) for layout in EXPERT_LORA]
# A download is written as the hosted service has it, and build_lora_adapter writes for vLLM. PEFT with
# transformers 5 reads neither where experts are adapted, which are one matrix there, nor where q, k and v of
# Qwen3.5 are. Those are read by our import instead.
QWEN3_5 = ("qwen3_5", "qwen3_5_moe")
DOWNLOADS_OF_PEFT = {each for each in LAYOUTS if each[0] not in (*EXPERTS, *QWEN3_5, "qwen3_moe")}
READ_BY_PEFT = {
    "own": DOWNLOADS_OF_PEFT | {("qwen3_moe", "per-expert")},
    "build_lora_adapter": DOWNLOADS_OF_PEFT | {("qwen3_moe", "shared-outer")},
}
# What the cookbook refuses, with its reason. It knows Qwen3.5 in its nested form alone (test_merge.py).
REFUSED = {
    ("build_lora_adapter", "deepseek_v3"): "does not support LoRA adapter serving in vLLM or SGLang",
    **{
        ("build_hf_model", family): "in_proj_k.weight' which does not exist in the model state dict"
        for family in QWEN3_5
    },
}


def write_model(path: Path, family: str) -> Path:
    """Write a model with a head of its own: the cookbook knows none where it is tied."""
    sizes = {"vocab_size": VOCABULARY, "max_position_embeddings": CONTEXT}
    wide = {"sliding_window": CONTEXT} if family == "mistral" else {}  # it is served up to its window only
    spec = tiny_model.Spec(vocab_size=VOCABULARY, max_positions=CONTEXT)
    if family in families.CONFIGS:
        tiny_model.write(path, spec)  # with a tokenizer
        return families.write(path, family, tie_word_embeddings=False, **sizes, **wide)
    spec = tiny_model.Spec(
        family=family, d_model=48, tied=False, vocab_size=VOCABULARY, max_positions=CONTEXT
    )
    return tiny_model.write(path, spec)


def trained(model: Path, data: Path, layout: str) -> tuple[Path, AdapterSpec]:
    """Train an adapter through the SDK; return the folder of its checkpoint."""
    with serving(model, data, expert_lora=layout) as server:
        server.wait_until_ready()
        with tinker.ServiceClient(base_url=server.url, api_key="tml-test") as service:
            trainer = service.create_lora_training_client(BASE_MODEL, rank=RANK, seed=1).result(SECONDS)
            losses = [train(trainer, batch(seed=3), adam=STEP) for _ in range(STEPS)]
            assert losses[-1] < losses[0]
            path = trainer.save_weights_for_sampler("trained").result(SECONDS).path
    folder = parse(path).folder(data / "checkpoints")
    return folder, AdapterSpec(
        rank=RANK, alpha=json.loads((folder / "adapter_config.json").read_text())["lora_alpha"]
    )


def log_probabilities(found: np.ndarray) -> np.ndarray:
    """Return those of all tokens [T, V], of logits."""
    found = found.astype(np.float64)
    return found - np.logaddexp.reduce(found, axis=-1, keepdims=True)


@pytest.mark.parametrize("family, layout", LAYOUTS, ids=str)
def test_every_form_has_our_log_probabilities(tmp_path, environment, family, layout):
    path, tokens = write_model(tmp_path / "model", family), np.array(random_tokens(40, seed=7), np.int32)
    folder, adapter = trained(path, tmp_path / "data", layout)
    export_merged(folder, path, tmp_path / "merged", "float32")
    for form in ("peft", "tinker"):
        export_adapter(folder, path, tmp_path / form, form)
    given = {name: str(tmp_path / name) for name in ("model", "merged", "peft", "tinker", "work")}
    given |= {"own": str(folder), "tokens": tokens.tolist(), "out": str(tmp_path / "out.npz")}
    run_python(environment, [PYTHON, str(HERE / "logits_of_forms.py"), json.dumps(given)])

    mesh = make_mesh(1, 1, 1)
    expected = log_probabilities(logits(mesh, path, tokens, adapter, folder, layout))
    base = log_probabilities(logits(mesh, path, tokens))
    assert np.abs(expected - base).max() > 0.05, "the adapter hardly matters"
    differ: dict[str, str] = {}

    def check(form: str, found: np.ndarray) -> None:
        off = np.abs(log_probabilities(found) - expected)
        worst = off[np.arange(len(tokens) - 1), tokens[1:]].max()
        differ[form] = f"{worst:.0e}"
        assert worst <= CLOSE, f"{form} is off by {worst:.1e}"
        assert off.max() <= CLOSE_OF_ALL, f"{form} is off by {off.max():.1e}"

    for form, found in np.load(tmp_path / "out.npz").items():
        if (form, family) in REFUSED:
            assert REFUSED[form, family] in str(found)
            differ[form] = "refused"
        elif (family, layout) in READ_BY_PEFT.get(form, LAYOUTS):
            assert found.dtype.kind != "U", f"{form}: {found}"
            check(form, found)
    forms = {"own": folder, "peft": tmp_path / "peft", "tinker": tmp_path / "tinker"}
    if ("build_lora_adapter", family) not in REFUSED:
        forms["build_lora_adapter"] = tmp_path / "work" / "converted"
    for form, given_folder in forms.items():
        shares = layout == "shared-outer" and form in ("own", "tinker")
        model = read_model_config(path, "shared-outer" if shares else "per-expert")
        announced = lora_config(given_folder)
        announced["rank"] = RANK if shares else RANK * model.expert_rank_divisor
        place, spec = tmp_path / f"imported {form}", msgspec.convert(announced, AdapterSpec)
        if (
            form == "build_lora_adapter" and layout == "per-expert"
        ):  # it does not write down the experts' rank
            with pytest.raises(InvalidRequest, match=r"experts.*has the shape .*; it must be"):
                convert(given_folder, place, spec, model, [str(path)])
            continue
        imported = convert(given_folder, place, spec, model, [str(path), BASE_MODEL])
        check(
            f"import of {form}",
            logits(mesh, path, tokens, imported, place, "shared-outer" if shares else "per-expert"),
        )
    print(family, layout, differ)


EXPERT_PARAMETERS = {"target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]}


@pytest.mark.parametrize(
    "family, config",
    [
        ("llama", {"target_modules": ["q_proj", "v_proj", "down_proj"], "use_rslora": True}),
        ("glm4_moe", {"target_modules": ["q_proj", "v_proj"], **EXPERT_PARAMETERS}),
        ("gpt_oss", {"target_modules": ["q_proj", "v_proj"], **EXPERT_PARAMETERS}),
        ("qwen3_5", {"target_modules": ["q_proj", "v_proj", "in_proj_qkv"]}),
    ],
)
def test_an_adapter_of_peft_comes_in_with_its_logits(tmp_path, environment, family, config):
    path, tokens = families.write(tmp_path / "model", family), families.tokens(family)
    patterns = {"rank_pattern": {"q_proj": 2}, "alpha_pattern": {"v_proj": 5.0}}
    config = {"r": 4, "lora_alpha": 8, "task_type": "CAUSAL_LM", **patterns, **config}
    given = {"model": str(path), "adapter": str(tmp_path / "sent"), "config": config}
    given |= {"tokens": tokens.tolist(), "out": str(tmp_path / "out.npy")}
    run_python(environment, [PYTHON, str(HERE / "train_with_peft.py"), json.dumps(given)])

    model = read_model_config(path, "per-expert")
    announced = lora_config(tmp_path / "sent") | {"rank": 4 * model.expert_rank_divisor}
    place = tmp_path / "place"
    adapter = convert(tmp_path / "sent", place, msgspec.convert(announced, AdapterSpec), model, [str(path)])
    found = logits(make_mesh(1, 1, 1), path, tokens, adapter, place, "per-expert")
    expected = np.load(tmp_path / "out.npy")
    base = logits(make_mesh(1, 1, 1), path, tokens)
    largest = np.abs(expected).max()
    assert np.abs(expected - base).max() > 0.01 * largest
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-4 * largest)
