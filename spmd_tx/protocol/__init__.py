"""The contract between coordinator, agents and workers: commands, reports, programs, the memory plan."""
