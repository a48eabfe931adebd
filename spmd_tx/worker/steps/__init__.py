"""The jitted steps of training and sampling, with their losses and state."""
