"""Compiles the programs of the steps, and knows which program each command needs."""
