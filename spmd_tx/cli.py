"""The command line: ``spmd-tx``. Commands import what they need when they run, so that help is instant."""


def main() -> None:
    """Run the command line."""
