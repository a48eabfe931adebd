"""Supervised steps, then reinforcement learning, against any server of the Tinker API."""
