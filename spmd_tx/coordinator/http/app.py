"""Builds the HTTP application from its controllers. Has no logic of its own."""

from importlib.metadata import version

from litestar import Litestar, Router
from litestar.datastructures import State
from litestar.di import Provide
from litestar.openapi import OpenAPIConfig
from litestar.openapi.plugins import JsonRenderPlugin
from litestar.types import ControllerRouterHandler

from spmd_tx.coordinator.http import error_shapes
from spmd_tx.coordinator.http.addresses import provide_address
from spmd_tx.coordinator.http.answer_guard import guard_answers
from spmd_tx.coordinator.http.anthropic.errors import ERRORS as ANTHROPIC_ERRORS
from spmd_tx.coordinator.http.anthropic.routes import MessagesController
from spmd_tx.coordinator.http.authentication import IN_TRAJECTORY, authenticate
from spmd_tx.coordinator.http.body_guard import guard_bodies
from spmd_tx.coordinator.http.console.checkpoints import SavedCheckpointsController
from spmd_tx.coordinator.http.console.pages import PagesController
from spmd_tx.coordinator.http.console.people import PeopleController
from spmd_tx.coordinator.http.console.runs import RunMetricsController, RunsController
from spmd_tx.coordinator.http.console.samples import SamplesController
from spmd_tx.coordinator.http.console.sdk_links import LinksController
from spmd_tx.coordinator.http.console.server import ServerController
from spmd_tx.coordinator.http.console.sign_in import SignInController
from spmd_tx.coordinator.http.console.timeline import TimelineController
from spmd_tx.coordinator.http.errors import MAX_BODY_BYTES
from spmd_tx.coordinator.http.openai.errors import ERRORS as OPENAI_ERRORS
from spmd_tx.coordinator.http.openai.response_routes import ResponsesController
from spmd_tx.coordinator.http.openai.routes import OpenAIController
from spmd_tx.coordinator.http.operator import OperatorController
from spmd_tx.coordinator.http.services import Services, provide_call, provide_services
from spmd_tx.coordinator.http.text_generation.kept_turns import of_this_trajectory
from spmd_tx.coordinator.http.tinker.checkpoints import CheckpointsController
from spmd_tx.coordinator.http.tinker.downloads import DownloadsController
from spmd_tx.coordinator.http.tinker.futures import FuturesController
from spmd_tx.coordinator.http.tinker.keys import KeysController
from spmd_tx.coordinator.http.tinker.models import ModelsController
from spmd_tx.coordinator.http.tinker.sampling import SamplingController
from spmd_tx.coordinator.http.tinker.sessions import SessionsController
from spmd_tx.coordinator.http.tinker.training import TrainingController
from spmd_tx.coordinator.http.tinker.trajectories import TrajectoriesController
from spmd_tx.coordinator.http.tinker.uploads import UploadsController
from spmd_tx.coordinator.http.tinker.usage import UsageController
from spmd_tx.coordinator.http.trace_headers import read_trace
from spmd_tx.coordinator.http.unknown_parameters import refuse_unknown

# Controllers of the Tinker API
TINKER: list[ControllerRouterHandler] = [
    SessionsController,
    UsageController,
    KeysController,
    ModelsController,
    TrainingController,
    SamplingController,
    CheckpointsController,
    DownloadsController,
    UploadsController,
    FuturesController,
    TrajectoriesController,
]


def _sampling(api: str, *controllers: ControllerRouterHandler) -> list[Router]:
    """Mount routes of an API, and again below the base URLs of trajectories, which keep what is sampled."""
    in_trajectory = f"{api}/in/{{{IN_TRAJECTORY}:str}}/v1"
    return [
        Router(f"{api}/v1", route_handlers=controllers),
        Router(in_trajectory, guards=[of_this_trajectory], route_handlers=controllers),
    ]


def make_app(services: Services) -> Litestar:
    """Build the application."""
    return Litestar(
        route_handlers=[
            Router("/api/v1", route_handlers=TINKER),
            OperatorController,
            *_sampling("/oai/api", OpenAIController, ResponsesController),
            *_sampling("/anthropic/api", MessagesController),
            RunsController,
            SavedCheckpointsController,
            RunMetricsController,
            TimelineController,
            SamplesController,
            ServerController,
            PeopleController,
            PagesController,
            LinksController,
            SignInController,
        ],
        guards=[authenticate],
        before_request=refuse_unknown,
        dependencies={
            "services": Provide(provide_services, sync_to_thread=False),
            "call": Provide(provide_call, sync_to_thread=False),
            "address": Provide(provide_address),
        },
        exception_handlers=error_shapes.handlers((OPENAI_ERRORS, ANTHROPIC_ERRORS)),
        state=State({"services": services}),
        request_max_body_size=MAX_BODY_BYTES,
        middleware=[guard_answers, guard_bodies, read_trace],
        openapi_config=OpenAPIConfig(
            title="spmd_tx",
            version=version("spmd_tx"),
            render_plugins=[JsonRenderPlugin()],
            use_handler_docstrings=True,
        ),
        logging_config=None,
    )
