"""Child processes for foreign or costly code, and what a process keeps from other users of the machine."""
