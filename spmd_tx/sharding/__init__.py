"""The device mesh: its axes, the declaration of a weight and its place, collectives, transfers."""
