"""All entries, in the order of the page: importing the checks enters them."""

from tests.conformance import (  # noqa: F401
    check_admin,
    check_arguments,
    check_cli,
    check_futures,
    check_images,
    check_losses,
    check_rest,
    check_sampling,
    check_service,
    check_training,
)
from tests.conformance.registry import Entry
from tests.conformance.registry import entries as _entered

GROUPS = (
    "ServiceClient",
    "TrainingClient",
    "SamplingClient",
    "RestClient",
    "AdminClient",
    "APIFuture",
    "AwaitableConcurrentFuture",
    "BackcompatTrainingClientFuture",
    "BackcompatSamplingClientFuture",
    "tinker",
)
TWICE = ("TrainingClient", "SamplingClient")  # on the client, and on its future

entries: list[Entry] = sorted(_entered, key=lambda entry: (GROUPS.index(entry.group), entry.label))
