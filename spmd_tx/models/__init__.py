"""The mathematics of the models: layers, LoRA, attention, paged keys and values, sampling from logits."""
