"""Makes tiny Qwen3 models with tokenizers of their own, and teaches them the form of answers, or a role."""

import hashlib
import json
import random
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from offline_roles import REPLIES, ROLES, Role, texts_of_all
from offline_texts import END_OF_TEXT, TURN_END, TURN_START, all_kinds, lesson
from tinker_cookbook.renderers import get_renderer
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedModel, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

ADDED_TOKENS = (END_OF_TEXT, TURN_START, TURN_END, "<think>", "</think>", "<tool_call>", "</tool_call>")
PRETRAINING_STEPS = 240

CHAT_TEMPLATE = """\
{%- for message in messages -%}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}
"""
TOKENIZER_CONFIG = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "model_max_length": 32768,
    "eos_token": TURN_END,
    "pad_token": END_OF_TEXT,
    "chat_template": CHAT_TEMPLATE,
}


Row = tuple[list[int], list[int]]  # tokens of a prompt, and of the answer


def write(hub: Path, names: tuple[str, ...]) -> None:
    """The same model under each name, in the layout of the Hugging Face cache."""
    tokenizer = train_tokenizer(all_kinds(random.Random(0)), 632)
    model = new_model(tokenizer)
    pretrain(model, rows_of_lessons(tokenizer))
    for name in names:
        save(new_snapshot(hub, name), model, tokenizer)


def write_roles(hub: Path) -> None:
    """A model for each role, all with one tokenizer."""
    tokenizer = train_tokenizer(texts_of_all(random.Random(3)), 1000)
    for name, (role, steps) in ROLES.items():
        print(name, flush=True)
        torch.manual_seed(len(name))
        model = new_model(tokenizer)
        pretrain(model, rows_of_role(tokenizer, role), steps)
        save(new_snapshot(hub, name), model, tokenizer)


def new_model(tokenizer: Tokenizer) -> Qwen3ForCausalLM:
    return Qwen3ForCausalLM(Qwen3Config(**model_config(tokenizer)))


def save(snapshot: Path, model: Qwen3ForCausalLM, tokenizer: Tokenizer) -> None:
    config = model_config(tokenizer)
    generation = {"eos_token_id": [config["eos_token_id"], config["bos_token_id"]]}
    tokenizer.save(str(snapshot / "tokenizer.json"))
    model.save_pretrained(snapshot)
    # After save_pretrained, which writes a config.json and a generation_config.json of its own.
    for file, content in (
        ("config", config),
        ("generation_config", generation),
        ("tokenizer_config", TOKENIZER_CONFIG),
    ):
        (snapshot / f"{file}.json").write_text(json.dumps(content, indent=2))


def new_snapshot(hub: Path, name: str) -> Path:
    """The folder of a model's one revision, which refs/main names."""
    revision = hashlib.sha1(name.encode()).hexdigest()
    root = hub / ("models--" + name.replace("/", "--"))
    snapshot = root / "snapshots" / revision
    snapshot.mkdir(parents=True, exist_ok=True)
    (root / "refs").mkdir(exist_ok=True)
    (root / "refs" / "main").write_text(revision)
    return snapshot


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Byte-level BPE with single digits, trained on the texts that the recipes will send."""
    tokenizer = Tokenizer(models.BPE())
    split = Regex(r" ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\s+")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(split, behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    # The trainer knows no special tokens.
    plain = (text.replace(TURN_START, "").replace(TURN_END, "") for text in texts)
    tokenizer.train_from_iterator(plain, trainer)
    special = (END_OF_TEXT, TURN_START, TURN_END)
    tokenizer.add_tokens(
        [AddedToken(token, special=token in special, normalized=False) for token in ADDED_TOKENS]
    )
    return tokenizer


def model_config(tokenizer: Tokenizer) -> dict[str, object]:
    ids = tokenizer.get_vocab()
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "attention_bias": False,
        "bos_token_id": ids[END_OF_TEXT],
        "eos_token_id": ids[TURN_END],
        "head_dim": 32,
        "hidden_act": "silu",
        "hidden_size": 128,
        "intermediate_size": 384,
        "max_position_embeddings": 32768,
        "num_attention_heads": 4,
        "num_hidden_layers": 2,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "tie_word_embeddings": True,
        "torch_dtype": "float32",
        "vocab_size": -len(ids) // 64 * -64,  # rounded up
    }


def rows_of_lessons(tokenizer: Tokenizer) -> Callable[[random.Random], Row]:
    """Rows that teach the form of the answers and nothing about their digits."""

    def row(draw: random.Random) -> Row:
        prompt, answer = lesson(draw)
        return tokenizer.encode(prompt).ids, tokenizer.encode(answer).ids

    return row


def rows_of_role(tokenizer: Tokenizer, role: Role) -> Callable[[random.Random], Row]:
    """Rows that teach a role, with prompts in the form in which the recipes send them."""
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=TURN_END, pad_token=END_OF_TEXT)
    renderers = {name: get_renderer(name, wrapped) for name in REPLIES}

    def row(draw: random.Random) -> Row:
        name, messages, reply = role(draw)
        prompt = renderers[name].build_generation_prompt(messages).to_ints()
        return prompt, tokenizer.encode(REPLIES[name].format(reply)).ids

    return row


def pretrain(
    model: PreTrainedModel,
    new_row: Callable[[random.Random], Any],
    steps: int = PRETRAINING_STEPS,
    loss_of: Callable[[Any, list[Any]], torch.Tensor] | None = None,
) -> None:
    """Teach a model what rows drawn at random say. Rows of more than text have a ``loss_of`` their own."""
    draw = random.Random(1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, betas=(0.9, 0.95), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, total_steps=steps)
    for step in range(steps):
        loss = (loss_of or answer_loss)(model, [new_row(draw) for _ in range(16)])
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % 20 == 0 or step == steps - 1:
            print(f"pre-training step {step}: loss {loss.item():.3f}", flush=True)


def answer_loss(model: Qwen3ForCausalLM, rows: list[Row]) -> torch.Tensor:
    length = max(len(prompt) + len(answer) for prompt, answer in rows)
    ids = torch.zeros((len(rows), length), dtype=torch.long)
    labels = torch.full_like(ids, -100)  # -100: no loss
    for row, (prompt, answer) in enumerate(rows):
        end = len(prompt) + len(answer)
        ids[row, :end] = torch.tensor(prompt + answer)
        labels[row, len(prompt) : end] = torch.tensor(answer)
    return model(input_ids=ids, labels=labels).loss  # padding stands behind the answers, where nothing looks
