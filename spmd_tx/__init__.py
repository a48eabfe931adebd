"""A self-hosted server of the Tinker API: trains and samples LoRA adapters of one base model with JAX."""
