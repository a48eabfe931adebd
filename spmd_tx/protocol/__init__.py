"""The contract between coordinator and workers: commands, reports, programs, the memory plan, the secret."""
