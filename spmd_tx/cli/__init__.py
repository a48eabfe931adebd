"""The command line: ``spmd-tx serve``, ``plan``, ``keys``, ``requests`` and the others."""
