"""The demo: writes a tiny model, trains it on this machine, and plots its reward."""
