"""Runs in the cookbook's environment: samples behind images of random sizes, as renderers make them.

python send_images.py MODEL COUNT
"""

import random
import sys

import numpy as np
import tinker
from PIL import Image
from tinker_cookbook.image_processing_utils import get_image_processor
from tinker_cookbook.renderers import ImagePart, Message, TextPart, get_renderer
from tinker_cookbook.tokenizer_utils import get_tokenizer

name, count = sys.argv[1], int(sys.argv[2])
draw, noise = random.Random(7), np.random.default_rng(7)
renderers = [
    get_renderer(each, get_tokenizer(name), image_processor=get_image_processor(name))
    for each in ("qwen3_5", "qwen3_5_disable_thinking")
]
sampler = tinker.ServiceClient().create_sampling_client(base_model=name)
answers = []
for _ in range(count):
    height, width = (round(2 ** draw.uniform(3, 8.5)) for _ in range(2))
    channels = draw.choice([1, 2, 3, 4])
    mode = {1: "L", 2: "LA", 3: "RGB", 4: "RGBA"}[channels]
    pixels = noise.integers(0, 256, (height, width, channels), np.uint8)
    image = Image.fromarray(pixels.squeeze(2) if channels == 1 else pixels, mode)
    parts = [ImagePart(type="image", image=image), TextPart(type="text", text="What is it?")]
    prompt = draw.choice(renderers).build_generation_prompt([Message(role="user", content=parts)])
    answers.append(sampler.sample(prompt, 1, tinker.SamplingParams(max_tokens=1, seed=1)))
taken = sum(len(answer.result().sequences[0].tokens) == 1 for answer in answers)
print(f"{taken} taken")
