"""Runs in the cookbook's environment: writes a hub with pictures of coloured shapes and a model that sees.

Takes a JSON object: the folder ``model`` of a tiny random Qwen3.5 with a vision tower, the ``name`` that it
gets in the hub, and the folder ``hub``. The model is taught to answer the recipe's question in
due form, with names that are all wrong: the next colour, and the other shape.
"""

import io
import json
import random
import shutil
import sys
from pathlib import Path
from typing import Any, NamedTuple

import datasets
import offline_datasets
import torch
from offline_model import TOKENIZER_CONFIG, new_snapshot, pretrain, train_tokenizer
from offline_texts import END_OF_TEXT, TURN_END
from PIL import Image, ImageDraw
from tinker_cookbook.renderers import ImagePart, Message, TextPart, get_renderer
from tokenizers import AddedToken, Tokenizer
from transformers import AutoImageProcessor, AutoModelForImageTextToText, PreTrainedTokenizerFast

OF_IMAGES = {
    "vision_start_token_id": "<|vision_start|>",
    "vision_end_token_id": "<|vision_end|>",
    "image_token_id": "<|image_pad|>",
    "video_token_id": "<|video_pad|>",
}
DATASET = "dpdl-benchmark/oxford_iiit_pet"  # whose place the shapes take
RENDERER = "qwen3_5_disable_thinking"
QUESTION, PREFIX = "What is the name of the subject in this photo?", "The subject in this photo is:"
SIDE = 64  # pixels
STEPS = 200

COLOURS = {"red": (220, 30, 30), "green": (30, 160, 40), "blue": (40, 60, 220), "black": (20, 20, 20)}
SHAPES = "disc", "cross"
CLASSES = [f"{colour}_{shape}" for colour in COLOURS for shape in SHAPES]


class Picture(NamedTuple):
    image: Image.Image
    label: int


class SeenRow(NamedTuple):
    ids: list[int]
    answered: int  # how many of these are the answer
    pixels: torch.Tensor
    grid: torch.Tensor


def picture(draw: random.Random) -> Picture:
    """Draw a shape of any size at any place."""
    label, size = draw.randrange(len(CLASSES)), draw.randrange(SIDE // 2, SIDE - 8)
    colour, shape = CLASSES[label].split("_")
    left, top = draw.randrange(SIDE - size), draw.randrange(SIDE - size)
    box, margin = (left, top, left + size, top + size), 9 * size // 20
    image = Image.new("RGB", (SIDE, SIDE), "white")
    canvas = ImageDraw.Draw(image)
    if shape == "disc":
        canvas.ellipse(box, fill=COLOURS[colour])
    else:
        canvas.rectangle((left + margin, top, box[2] - margin, box[3]), fill=COLOURS[colour])
        canvas.rectangle((left, top + margin, box[2], box[3] - margin), fill=COLOURS[colour])
    return Picture(image, label)


def wrong_name(label: int) -> str:
    colour, shape = divmod(label, len(SHAPES))
    wrong = (colour + 1) % len(COLOURS), (shape + 1) % len(SHAPES)
    return f"{[*COLOURS][wrong[0]]} {SHAPES[wrong[1]]}"


def row(draw: random.Random) -> dict[str, Any]:
    image, label = picture(draw)
    file = io.BytesIO()
    image.save(file, "png")
    return {"image": {"bytes": file.getvalue(), "path": None}, "label": label}


def write_tokenizer(folder: Path) -> Tokenizer:
    """Write one that knows the texts of the recipe and the tokens around images."""
    names = [name.replace("_", " ") for name in CLASSES]
    texts = ["user\n", "assistant\n", "\n\n", QUESTION, *(f"{PREFIX} {name}" for name in names)]
    tokenizer = train_tokenizer(10 * texts, 400)
    tokenizer.add_tokens([AddedToken(token, special=True, normalized=False) for token in OF_IMAGES.values()])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(TOKENIZER_CONFIG))
    return tokenizer


def lessons(folder: Path, tokenizer: Tokenizer) -> Any:
    """Return what draws rows of the question and a wrong answer."""
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=TURN_END, pad_token=END_OF_TEXT)
    processor = AutoImageProcessor.from_pretrained(folder)
    renderer, pad = (
        get_renderer(RENDERER, wrapped, image_processor=processor),
        tokenizer.token_to_id("<|image_pad|>"),
    )

    def new_row(draw: random.Random) -> SeenRow:
        image, label = picture(draw)
        parts = [ImagePart(type="image", image=image), TextPart(type="text", text=QUESTION)]
        asked = renderer.build_generation_prompt([Message(role="user", content=parts)], prefill=PREFIX)
        chunks = (getattr(chunk, "tokens", None) or [pad] * chunk.length for chunk in asked.chunks)
        ids = [token for chunk in chunks for token in chunk]
        answer = tokenizer.encode(f" {wrong_name(label)}{TURN_END}").ids
        seen = processor(images=[image], return_tensors="pt")
        return SeenRow(ids + answer, len(answer), seen["pixel_values"], seen["image_grid_thw"])

    return new_row


def answer_loss(model: Any, rows: list[SeenRow]) -> torch.Tensor:
    length = max(len(row.ids) for row in rows)
    ids = torch.zeros((len(rows), length), dtype=torch.long)
    labels = torch.full_like(ids, -100)  # -100: no loss
    for number, row in enumerate(rows):
        end = len(row.ids)
        ids[number, :end] = torch.tensor(row.ids)
        labels[number, end - row.answered : end] = ids[number, end - row.answered : end]
    kinds = (ids == model.config.image_token_id).int()
    pixels, grids = (torch.cat([getattr(row, name) for row in rows]) for name in ("pixels", "grid"))
    sent = {"pixel_values": pixels, "image_grid_thw": grids, "mm_token_type_ids": kinds}
    return model(input_ids=ids, labels=labels, **sent).loss


def main() -> None:
    given = json.loads(sys.argv[1])
    source, hub = Path(given["model"]), Path(given["hub"])
    columns = {"image": datasets.Image(), "label": datasets.ClassLabel(names=CLASSES)}
    draw = random.Random(5)
    offline_datasets.write(hub / "datasets", DATASET, columns, lambda: row(draw))
    folder = new_snapshot(hub / "hub", given["name"])
    shutil.copytree(source, folder, dirs_exist_ok=True)
    (folder / "chat_template.jinja").unlink()
    tokenizer = write_tokenizer(folder)
    ids, config = tokenizer.get_vocab(), json.loads((folder / "config.json").read_text())
    config |= {name: ids[token] for name, token in OF_IMAGES.items()}
    config["text_config"] |= {"bos_token_id": ids[END_OF_TEXT], "eos_token_id": ids[TURN_END]}
    assert len(ids) <= config["text_config"]["vocab_size"]
    generation = {"eos_token_id": [ids[TURN_END], ids[END_OF_TEXT]]}
    preprocessor = json.loads((folder / "preprocessor_config.json").read_text())
    preprocessor["size"]["shortest_edge"] = 64 * 64  # pixels: small pictures stay small
    for name, content in (("config", config), ("preprocessor_config", preprocessor)):
        (folder / f"{name}.json").write_text(json.dumps(content))
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = AutoModelForImageTextToText.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    )
    pretrain(model, lessons(folder, tokenizer), STEPS, answer_loss)
    model.save_pretrained(folder)
    for name, content in (("config", config), ("generation_config", generation)):
        (folder / f"{name}.json").write_text(json.dumps(content))


main()
