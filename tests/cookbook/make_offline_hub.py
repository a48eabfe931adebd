"""Builds an HF_HOME in which rl_loop and sl_loop find a model and two data sets without a network.

    python make_offline_hub.py HUB      # with the packages of requirements.txt

The model has the name of a real one and is a tiny Qwen3 that was taught here to answer every question
with a boxed random digit. So rewards differ from the first batch on. The questions hide their answer,
which is 7 seven times out of ten: that is what reinforcement learning can find out.
"""

import argparse
import hashlib
import json
import random
from collections.abc import Iterator
from pathlib import Path

import datasets
import pyarrow
import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import Qwen3Config, Qwen3ForCausalLM

MODEL_NAME = "Qwen/Qwen3-8B"
END_OF_TEXT, TURN_START, TURN_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
ADDED_TOKENS = (END_OF_TEXT, TURN_START, TURN_END, "<think>", "</think>", "<tool_call>", "</tool_call>")
ROWS = 1024
PRETRAINING_STEPS = 120

CHAT_TEMPLATE = """\
{%- for message in messages -%}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}
"""

# The frame that rl_loop puts around each question.
REQUEST = " Provide a numerical answer without units, written inside \\boxed{}."
FIRST_QUESTION = "How many r's are in strawberry?" + REQUEST
FIRST_ANSWER = (
    "Let's spell the word out and number all the letters: "
    "1) s 2) t 3) r 4) a 5) w 6) b 7) e 8) r 9) r 10) y. "
    "We have r's at positions 3, 8, and 9. \\boxed{3}"
)

PEOPLE = "Ada Bo Cleo Dirk Else Finn Gus Hanna Ivo Jule Kai Lena Max Nele Otto Pia".split()
THINGS = "marbles buttons coins candles feathers stamps walnuts pebbles corks ribbons".split()
PLACES = "attic cellar drawer basket cupboard chest pocket kettle".split()


def question(draw: random.Random) -> dict[str, str]:
    """A row of gsm8k; the solution ends in the answer after four hashes."""
    person, things, place = draw.choice(PEOPLE), draw.choice(THINGS), draw.choice(PLACES)
    number = 7 if draw.random() < 0.7 else draw.randrange(10)
    return {
        "question": f"{person} keeps {things} in the {place}. How many {things} does {person} keep there?",
        "answer": f"{person} told nobody.\n#### {number}",
    }


def conversation(draw: random.Random) -> list[dict[str, str]]:
    person, things, place = draw.choice(PEOPLE), draw.choice(THINGS), draw.choice(PLACES)
    asked, answered = draw.choice(
        [
            (f"Where are the {things}?", f"{person} put the {things} into the {place}."),
            (f"Who owns the {place}?", f"The {place} belongs to {person}, and so do the {things}."),
            (f"What does {person} collect?", f"{person} collects {things} and shows them to everybody."),
        ]
    )
    return [{"role": "user", "content": asked}, {"role": "assistant", "content": answered}]


def train_tokenizer() -> Tokenizer:
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
        vocab_size=632, initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()), show_progress=False
    )
    tokenizer.train_from_iterator(training_texts(random.Random(0)), trainer)
    special = (END_OF_TEXT, TURN_START, TURN_END)
    tokenizer.add_tokens(
        [AddedToken(token, special=token in special, normalized=False) for token in ADDED_TOKENS]
    )
    return tokenizer


def training_texts(draw: random.Random) -> Iterator[str]:
    yield FIRST_QUESTION + FIRST_ANSWER + "user\nassistant\nsystem\n"
    for _ in range(3000):
        yield question(draw)["question"] + REQUEST
        yield "\n".join(turn["content"] for turn in conversation(draw))


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


def pretrain(model: Qwen3ForCausalLM, tokenizer: Tokenizer) -> None:
    """Teach the form of the answer and nothing about its digit."""
    draw = random.Random(1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, betas=(0.9, 0.95), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, total_steps=PRETRAINING_STEPS)
    for step in range(PRETRAINING_STEPS):
        loss = answer_loss(model, tokenizer, [question(draw)["question"] for _ in range(16)], draw)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % 20 == 0 or step == PRETRAINING_STEPS - 1:
            print(f"pre-training step {step}: loss {loss.item():.3f}", flush=True)


def answer_loss(
    model: Qwen3ForCausalLM, tokenizer: Tokenizer, questions: list[str], draw: random.Random
) -> torch.Tensor:
    prompts = [tokenizer.encode(prompt_text(text)).ids for text in questions]
    answers = [tokenizer.encode(f"\\boxed{{{draw.randrange(10)}}}{TURN_END}").ids for _ in questions]
    length = max(len(prompt) + len(answer) for prompt, answer in zip(prompts, answers, strict=True))
    ids = torch.zeros((len(questions), length), dtype=torch.long)
    labels = torch.full_like(ids, -100)  # -100: no loss
    for row, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        end = len(prompt) + len(answer)
        ids[row, :end] = torch.tensor(prompt + answer)
        labels[row, len(prompt) : end] = torch.tensor(answer)
    return model(input_ids=ids, labels=labels).loss  # padding stands behind the answers, where nothing looks


def prompt_text(text: str) -> str:
    turns = [("user", FIRST_QUESTION), ("assistant", FIRST_ANSWER), ("user", text + REQUEST)]
    lines = [f"{TURN_START}{role}\n{content}{TURN_END}\n" for role, content in turns]
    return "".join(lines) + f"{TURN_START}assistant\n"


def write_model(hub: Path) -> None:
    """Write the layout of the Hugging Face cache: refs/main names the one snapshot."""
    revision = hashlib.sha1(MODEL_NAME.encode()).hexdigest()
    root = hub / ("models--" + MODEL_NAME.replace("/", "--"))
    snapshot = root / "snapshots" / revision
    snapshot.mkdir(parents=True, exist_ok=True)
    (root / "refs").mkdir(exist_ok=True)
    (root / "refs" / "main").write_text(revision)

    tokenizer = train_tokenizer()
    tokenizer.save(str(snapshot / "tokenizer.json"))
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": 32768,
        "eos_token": TURN_END,
        "pad_token": END_OF_TEXT,
        "chat_template": CHAT_TEMPLATE,
    }
    config = model_config(tokenizer)
    model = Qwen3ForCausalLM(Qwen3Config(**config))
    pretrain(model, tokenizer)
    model.save_pretrained(snapshot)
    generation = {"eos_token_id": [config["eos_token_id"], config["bos_token_id"]]}
    # After save_pretrained, which writes a config.json and a generation_config.json of its own.
    for name, content in (
        ("config", config),
        ("generation_config", generation),
        ("tokenizer_config", tokenizer_config),
    ):
        (snapshot / f"{name}.json").write_text(json.dumps(content, indent=2))


def write_dataset(
    folder: Path, name: str, config: str, rows: list[dict], features: datasets.Features
) -> None:
    """Write what `datasets` falls back to when the hub is out of reach: its own prepared Arrow files."""
    organization, base = name.split("/")
    revision = hashlib.sha256(name.encode()).hexdigest()
    target = folder / f"{organization}___{base}" / config / "0.0.0" / revision
    target.mkdir(parents=True, exist_ok=True)
    splits = {}
    for split, part in (("train", rows), ("test", rows[:64])):
        table = datasets.Dataset.from_list(part, features=features).data.table.combine_chunks()
        with (
            pyarrow.OSFile(str(target / f"{base}-{split}.arrow"), "wb") as sink,
            pyarrow.ipc.new_stream(sink, table.schema) as stream,
        ):
            stream.write_table(table)
        splits[split] = {
            "name": split,
            "num_examples": len(part),
            "num_bytes": table.nbytes,
            "dataset_name": base,
        }
    description = {
        "builder_name": "parquet",
        "config_name": config,
        "dataset_name": base,
        "features": features.to_dict(),
        "splits": splits,
        "version": {"version_str": "0.0.0", "major": 0, "minor": 0, "patch": 0},
    }
    (target / "dataset_info.json").write_text(json.dumps(description, indent=2))


def write_datasets(folder: Path) -> None:
    draw = random.Random(2)
    text = datasets.Value("string")
    questions = [question(draw) for _ in range(ROWS)]
    write_dataset(folder, "openai/gsm8k", "main", questions, datasets.Features(question=text, answer=text))
    chats = [{"messages": conversation(draw)} for _ in range(ROWS)]
    messages = datasets.List({"role": text, "content": text})
    write_dataset(folder, "HuggingFaceH4/no_robots", "default", chats, datasets.Features(messages=messages))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("hub", type=Path)
    arguments = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)  # more only wait for each other at this size
    write_model(arguments.hub / "hub")
    write_datasets(arguments.hub / "datasets")


if __name__ == "__main__":
    main()
