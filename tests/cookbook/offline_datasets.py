"""Writes data sets of made-up rows to where `datasets` looks for them when the hub is out of reach."""

import hashlib
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import pyarrow
from offline_texts import conversation, preference, question

TEXT = datasets.Value("string")
MESSAGES = datasets.List({"role": TEXT, "content": TEXT})
ROWS = 1024
TEST_ROWS = 64

Row = dict[str, Any]


def write_all(folder: Path) -> None:
    draw = random.Random(2)
    # Each with the columns that the cookbook reads.
    write(folder, "openai/gsm8k", {"question": TEXT, "answer": TEXT}, lambda: question(draw), config="main")
    write(folder, "HuggingFaceH4/no_robots", {"messages": MESSAGES}, lambda: {"messages": conversation(draw)})
    write(folder, "Anthropic/hh-rlhf", {"chosen": TEXT, "rejected": TEXT}, lambda: preference(draw))
    write(folder, "zwhe99/DeepMath-103K", {"question": TEXT, "final_answer": TEXT}, lambda: deep_math(draw))
    thoughts = datasets.List({"from": TEXT, "value": TEXT})
    write(
        folder, "open-thoughts/OpenThoughts3-1.2M", {"conversations": thoughts}, lambda: open_thoughts(draw)
    )
    tulu = "allenai/tulu-3-sft-mixture"
    write(folder, tulu, {"messages": MESSAGES}, lambda: {"messages": conversation(draw)})


def deep_math(draw: random.Random) -> Row:
    row = question(draw)
    return {"question": row["question"], "final_answer": row["answer"].split()[-1]}


def open_thoughts(draw: random.Random) -> Row:
    names = {"user": "human", "assistant": "gpt"}
    turns = [{"from": names[turn["role"]], "value": turn["content"]} for turn in conversation(draw)]
    return {"conversations": turns}


def write(
    folder: Path, name: str, columns: dict[str, Any], new_row: Callable[[], Row], config: str = "default"
) -> None:
    """Write the Arrow files that `datasets` itself prepares after a download, and their description."""
    organization, title = name.split("/")
    base = datasets.naming.camelcase_to_snakecase(title)
    features = datasets.Features(columns)
    target = (
        folder / f"{organization}___{base}" / config / "0.0.0" / hashlib.sha256(name.encode()).hexdigest()
    )
    target.mkdir(parents=True, exist_ok=True)
    splits = {}
    for split, count in (("train", ROWS), ("test", TEST_ROWS)):
        rows = [new_row() for _ in range(count)]
        table = datasets.Dataset.from_list(rows, features=features).data.table.combine_chunks()
        with (
            pyarrow.OSFile(str(target / f"{base}-{split}.arrow"), "wb") as sink,
            pyarrow.ipc.new_stream(sink, table.schema) as stream,
        ):
            stream.write_table(table)
        splits[split] = {
            "name": split,
            "num_examples": count,
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
