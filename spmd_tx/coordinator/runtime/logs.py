"""Sets up the log of the coordinator and of agents: a line per event, on standard error."""

import logging
import sys
from datetime import UTC, datetime
from types import TracebackType

import msgspec

from spmd_tx.config import LogFormat
from spmd_tx.coordinator.runtime import log_groups
from spmd_tx.open_telemetry import Seldom

OF_WORKERS = logging.getLogger("spmd_tx.output_of_workers")


def log_to_stderr(form: LogFormat) -> None:
    """Write a line for people, or a JSON object, for each event from now on."""
    handler = logging.StreamHandler()
    handler.setFormatter(_Json() if form == "json" else _Text(datefmt="%H:%M:%S"))
    handler.addFilter(Seldom())
    handler.addFilter(_name_group)
    logging.basicConfig(handlers=[handler], level=logging.WARNING)
    logging.getLogger("spmd_tx").setLevel(logging.INFO)
    logging.captureWarnings(True)
    if form == "json":
        sys.excepthook = _log_end


def is_json() -> bool:
    """Return whether lines of the log are JSON objects."""
    return any(isinstance(handler.formatter, _Json) for handler in logging.getLogger().handlers)


def _log_end(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    logging.getLogger("spmd_tx").critical("the process ends by an error", exc_info=(kind, error, trace))


def pass_on(worker: int, text: str) -> None:
    """Log a line that a worker has written."""
    OF_WORKERS.info("%s", text, extra={"worker": worker})


def _name_group(record: logging.LogRecord) -> bool:
    """Note for which group of workers the code runs that tells of an event."""
    record.group = group = log_groups.current()
    record.of_group = f"{group}: " if group else ""
    return True


class _Text(logging.Formatter):
    """Formats events for people; lines of workers are left as they are, behind the number of the worker."""

    def __init__(self, datefmt: str) -> None:
        super().__init__("%(asctime)s %(levelname)s %(of_group)s%(message)s", datefmt)

    def format(self, record: logging.LogRecord) -> str:
        worker, of_group = getattr(record, "worker", None), getattr(record, "of_group", "")
        record.of_group = of_group
        return (
            super().format(record) if worker is None else f"{of_group}worker {worker}: {record.getMessage()}"
        )


class _Json(logging.Formatter):
    """Formats events as JSON objects, for a collector of logs."""

    def format(self, record: logging.LogRecord) -> str:
        told = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "logger": record.name,
            "group": getattr(record, "group", None),
            "worker": getattr(record, "worker", None),
            "message": record.getMessage(),
            "traceback": self.formatException(record.exc_info) if record.exc_info else None,
            "stack": record.stack_info,
        }
        return msgspec.json.encode(
            {name: _encodable(value) for name, value in told.items() if value is not None}
        ).decode()


def _encodable(value: str | int) -> str | int:
    """Escape halves of surrogate pairs, which JSON in UTF-8 cannot hold."""
    return value.encode(errors="backslashreplace").decode() if isinstance(value, str) else value
