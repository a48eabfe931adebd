"""Writes transformers_vision.npz. Needs torch and transformers: python -m tests.golden.write_vision"""

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import AutoModelForImageTextToText

from spmd_tx.models.families.registry import declare
from tests.golden.vision_cases import (
    CONFIGS,
    FROM,
    GREEDY,
    GRIDS,
    IMAGE_ID,
    KEPT,
    NUMBERS,
    PROMPT,
    ROWS,
    TOKENS,
    is_image,
    patches,
    sloped,
    text,
    write,
)


def pixels(grids: list[tuple[int, int]]) -> dict[str, torch.Tensor]:
    """Return what transformers' processor makes of images: normalized patches, each of two equal frames."""
    values = [patches(grid).reshape(-1, 3, 1, 256).astype(np.float32) / 255 for grid in grids]
    frames = np.concatenate(values).repeat(2, axis=2).reshape(-1, 1536)
    thw = torch.tensor([[1, *grid] for grid in grids])
    return {"pixel_values": torch.from_numpy((frames - 0.5) / 0.5), "image_grid_thw": thw}


def numbers(name: str, directory: Path) -> dict[str, np.ndarray]:
    how = {"attn_implementation": "eager", "experts_implementation": "eager", "dtype": torch.float32}
    path = write(directory, name)
    model, report = AutoModelForImageTextToText.from_pretrained(path, output_loading_info=True, **how)
    if problems := {key: found for key, found in report.items() if found}:
        raise SystemExit(f"{name}: {problems}")
    model.eval()
    arrays = {}
    for grid in GRIDS:
        sent = pixels([grid])
        made = model.model.visual(sent["pixel_values"], grid_thw=sent["image_grid_thw"], return_dict=True)
        planes = [made.pooler_output, *(getattr(made, "deepstack_features", None) or [])]
        rows = torch.stack(planes)[:, list(TOKENS)]
        arrays[f"{name}/tokens/{grid[0]}x{grid[1]}"] = rows.numpy()
    images = is_image()
    ids = torch.from_numpy(np.where(images, IMAGE_ID, text()).astype(np.int64))[None]
    sent = pixels([piece for piece in PROMPT if not isinstance(piece, int)])
    kinds = torch.from_numpy(images[None].astype(np.int32))
    places, _ = model.model.get_rope_index(
        ids, mm_token_type_ids=kinds, image_grid_thw=sent["image_grid_thw"]
    )
    answer = model(ids, mm_token_type_ids=kinds, **sent).logits[0]
    greedy, logprobs = [], []
    following = answer[-1]
    for _ in range(GREEDY):
        greedy.append(int(following.argmax()))
        logprobs.append(float(following.log_softmax(-1).max()))
        assert greedy[-1] not in range(IMAGE_ID, IMAGE_ID + 2), "to transformers it is an image"
        later, more = (
            torch.cat([ids, torch.tensor([greedy])], dim=1),
            nn.functional.pad(kinds, (0, len(greedy))),
        )
        following = model(later, mm_token_type_ids=more, **sent).logits[0, -1]
    arrays[f"{name}/greedy"] = np.array(greedy, np.int32)
    arrays[f"{name}/greedy_logprobs"] = np.array(logprobs, np.float32)
    arrays |= slopes(name, model, (ids, kinds, sent))
    arrays[f"{name}/places"] = places[:, 0].T.numpy().astype(np.int32)
    return arrays | {f"{name}/logits": answer[list(ROWS)].numpy()}


def slopes(name: str, model: Any, prompt: tuple[Any, Any, Any]) -> dict[str, np.ndarray]:
    """Return the gradients of maps, which stay [out, in] in memory."""
    ids, kinds, sent = prompt
    with torch.enable_grad():
        logprobs = model(ids, mm_token_type_ids=kinds, **sent).logits[0, :-1].log_softmax(-1)
        of_next = logprobs[torch.arange(ids.shape[1] - 1), ids[0, 1:]]
        is_counted = torch.from_numpy(~is_image()[1:])
        is_counted[:FROM] = False
        (-of_next[is_counted].sum()).backward()
    gradients = {key: parameter.grad for key, parameter in model.named_parameters()}
    found = {}
    for key, each in sloped(declare(CONFIGS[name])).items():
        named = [gradients[each.map.source.name.format(layer=layer)] for layer in each.numbers or ()]
        found[f"{name}/slope/{key}"] = torch.stack(named).swapaxes(1, 2)[..., :KEPT].numpy()
    return found


if __name__ == "__main__":
    with torch.no_grad(), tempfile.TemporaryDirectory() as folder:
        found = {name: numbers(name, Path(folder) / name) for name in CONFIGS}
    np.savez_compressed(NUMBERS, **{key: value for each in found.values() for key, value in each.items()})
