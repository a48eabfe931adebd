"""``spmd-tx demo``: a tiny model that learns on this machine, from its making to a plot of its reward."""
