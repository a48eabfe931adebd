"""Says which fields of PEFT's adapter_config.json leave the factors plain LoRA, B A times a scale. No JAX.

PEFT adds fields with each release, and most of them give the factors another meaning. So what is understood
is listed here, and a field that is not is refused, unless its value is none.
"""

from collections.abc import Mapping
from typing import Any

from spmd_tx.errors import InvalidRequest

SHOWN = 200  # characters of a value
# Read elsewhere: ranks, scales, and which modules have factors (meaning.py, selection.py).
READ = (
    "base_model_name_or_path",
    "r",
    "lora_alpha",
    "use_rslora",
    "rank_pattern",
    "alpha_pattern",
    "target_modules",
    "target_parameters",
    "exclude_modules",
    "layers_to_transform",
    "layers_pattern",
)
# Of training, of loading, or of an initialization that init_lora_weights chooses.
WITHOUT_EFFECT = (
    "auto_mapping",
    "corda_config",
    "eva_config",
    "inference_mode",
    "loftq_config",
    "lora_dropout",
    "lora_ga_config",
    "megatron_core",
    "merge_weights",
    "peft_version",
    "qalora_group_size",
    "runtime_config",
    "task_type",
)
# The first value is what PEFT writes where nothing is asked for. Initialisations that are not here change the
# base model's weights as well, and the factors belong to what remains of them.
PLAIN: dict[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "bias": ("none",),
    "init_lora_weights": (True, "gaussian", "eva", "orthogonal", "mica"),
    "revision": ("main",),
}
REMEDIES = {
    "init_lora_weights": "they belong to a base model whose weights were changed, too, so save the adapter "
    "again with path_initial_model_for_weight_conversion of peft's save_pretrained",
    "revision": "if the base model that is served is this revision, set it to null",
}
MERGE = "merge such an adapter into its base model with peft, and use the result"


def check_fields(config: Mapping[str, Any], file: object) -> None:
    """Raise InvalidRequest for a value with which factors mean something else; ``file`` is for messages."""
    for name, value in config.items():
        if name in READ or name in WITHOUT_EFFECT or not value:
            continue
        plain = PLAIN.get(name, ())
        if any(type(value) is type(each) and _folded(value) == _folded(each) for each in plain):
            continue
        unlike = f", unlike {' or '.join(map(repr, plain))}," if plain else ""
        raise InvalidRequest(
            f"{name} of {file} is {_shown(value)}, with which{unlike} factors mean something else than plain "
            f"LoRA; {REMEDIES.get(name, MERGE)}"
        )


def _folded(value: Any) -> Any:
    return value.casefold() if isinstance(value, str) else value


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}..."
