"""Names of groups of workers. A replica has that of its group and a number: "rollouts/3"."""

from pathlib import Path

MAIN = "main"  # the group that the options of the server describe
GROUPS_FOLDER = "groups"  # in the data directory: what other groups keep
REPLICA = "/"  # stands before the number of a replica


def template_of(group: str) -> str:
    """Return the name by which the operator declared a group: without the number of a replica."""
    return group.partition(REPLICA)[0]


def is_replica(group: str) -> bool:
    """Say whether a group is one of several that are alike, whose workers join without a number."""
    return REPLICA in group


def folder_of(data_dir: Path, group: str) -> Path:
    """Return the folder for what a group keeps; that of a replica is in the folder of its group."""
    return data_dir if group == MAIN else data_dir / GROUPS_FOLDER / group
