"""Defines the steps of full-parameter training that write_full.py takes with torch.

transformers_full.npz holds ``<family>/losses`` float32 [STEPS], before each step, and, for some tensors of
the checkpoint, ``<family>/<tensor>`` float16: what STEPS steps add to it, divided by the learning rate.
"""

from pathlib import Path

FULL = Path(__file__).parent / "transformers_full.npz"
# With a tied head and biases; with norms of queries and keys; with layers that keep a state.
FAMILIES = ("llama", "qwen3_yarn", "qwen3_5")
STEPS = 5
ADAM = {
    "learning_rate": 3e-3,
    "beta1": 0.9,
    "beta2": 0.95,
    "eps": 0.1,  # with less, rounding of small gradients grows tenfold each step, within torch, too
    "weight_decay": 0.1,
    "grad_clip_norm": 20.0,
}


def is_kept(name: str) -> bool:
    return "layers.0." not in name
