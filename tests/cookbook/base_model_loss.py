"""Prints the loss of sl_loop's first batch under the base model, computed with transformers.

python base_model_loss.py MODEL BATCH_SIZE      # in the environment of `make cookbook`
"""

import sys

import datasets
import torch
from tinker import TensorData
from tinker_cookbook import model_info, renderers
from tinker_cookbook.supervised.common import compute_mean_nll
from tinker_cookbook.supervised.data import conversation_to_datum
from tinker_cookbook.tokenizer_utils import get_tokenizer
from transformers import AutoModelForCausalLM


def main(model_name: str, batch_size: int) -> None:
    renderer = renderers.get_renderer(
        model_info.get_recommended_renderer_name(model_name), get_tokenizer(model_name)
    )
    rows = datasets.load_dataset("HuggingFaceH4/no_robots")["train"].shuffle(seed=0).select(range(batch_size))
    model = AutoModelForCausalLM.from_pretrained(model_name).float().eval()

    logprobs, weights = [], []
    for row in rows:
        datum = conversation_to_datum(
            row["messages"], renderer, 32768, renderers.TrainOnWhat.ALL_ASSISTANT_MESSAGES
        )
        with torch.no_grad():
            logits = model(torch.tensor([datum.model_input.to_ints()])).logits[0]
        targets = datum.loss_fn_inputs["target_tokens"].to_torch()
        of_targets = logits.log_softmax(-1).gather(1, targets[:, None])[:, 0]
        logprobs.append(TensorData.from_torch(of_targets))
        weights.append(datum.loss_fn_inputs["weights"])
    print(compute_mean_nll(logprobs, weights))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
