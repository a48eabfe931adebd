"""The mathematics of the models: Qwen3, LoRA, attention, paged keys and values, sampling from logits."""
