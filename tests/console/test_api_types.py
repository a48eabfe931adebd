"""The console's types are those of the routes, and the invented answers of its tests have them, too."""

from pathlib import Path

import msgspec
import pytest

from spmd_tx.coordinator.http.console.sign_in import SignedIn
from spmd_tx.coordinator.wire.console.checkpoints import SavedCheckpointsResponse
from spmd_tx.coordinator.wire.console.people import KeysResponse, UseResponse
from spmd_tx.coordinator.wire.console.run_samples import SampleGroup, SamplesPage
from spmd_tx.coordinator.wire.console.run_timing import RunTiming
from spmd_tx.coordinator.wire.console.runs import (
    CurvesResponse,
    MetricsResponse,
    OpenRunsResponse,
    Run,
    RunsResponse,
)
from spmd_tx.coordinator.wire.console.server_page import ServerPage
from spmd_tx.coordinator.wire.trajectories import TrajectoryList, TrajectoryTree
from tests.console import api_schema, invented, invented_trajectory, stand_in

TYPES = Path(__file__).parents[2] / "console/src/api_types.ts"
RUN = f"runs/{invented.runs()[0]['id']}"


def test_the_types_are_generated_from_the_routes_of_today():
    assert f"// SHA-256 of their document: {api_schema.digest()}\n" in TYPES.read_text(), "run: make console"


@pytest.mark.parametrize(
    ("path", "type_"),
    [
        ("runs", RunsResponse),
        (RUN, Run),
        ("open_runs", OpenRunsResponse),
        (f"{RUN}/metrics", MetricsResponse),
        (f"{RUN}/curves", CurvesResponse),
        (f"{RUN}/timing", RunTiming),
        (f"{RUN}/samples", SamplesPage),
        (f"{RUN}/samples/request-1", SampleGroup),
        ("server", ServerPage),
        ("checkpoints", SavedCheckpointsResponse),
        ("keys", KeysResponse),
        ("usage", UseResponse),
        ("session", SignedIn),
    ],
)
def test_invented_answers_are_like_those_of_the_routes(path: str, type_: type):
    query = {"hours": "24", "limit": "20", "seconds": "300", "after": "0"}
    msgspec.convert(stand_in.answer(path, query), type_)


@pytest.mark.parametrize("query", [{"outline": "true"}, {"turns_of": "request-5", "tokens": "true"}, {}])
def test_invented_trajectories_are_like_those_of_the_routes(query: dict[str, str]):
    msgspec.convert(invented_trajectory.listed(), TrajectoryList)
    assert msgspec.convert(invented_trajectory.tree(query), TrajectoryTree).turns
