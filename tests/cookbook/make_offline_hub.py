"""Builds an HF_HOME in which the recipes find a model and their data sets without a network.

    python make_offline_hub.py HUB      # with the packages of requirements.txt

The model has the names of real ones and is a tiny Qwen3 that was taught here to answer every question
with a boxed random digit, and to say who it is in one to six words. So rewards differ from the first batch
on. The questions hide their answer, which is 7 seven times out of ten: that is what reinforcement
learning can find out.
"""

import argparse
from pathlib import Path

import offline_datasets
import offline_model
import torch

# The cookbook picks the renderer by name: qwen3 stops at a token, role_colon (of -Base) at a text.
MODEL_NAMES = ("Qwen/Qwen3-8B", "Qwen/Qwen3-8B-Base")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("hub", type=Path)
    arguments = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)  # more only wait for each other at this size
    offline_datasets.write_all(arguments.hub / "datasets")
    offline_model.write(arguments.hub / "hub", MODEL_NAMES)
    offline_model.write_roles(arguments.hub / "hub")


if __name__ == "__main__":
    main()
