"""Holds the metrics of one run as columns, and gives curves of at most so many points. Pure.

A column that grows long is halved: each pair of points becomes one, with the least and the greatest value. So
the memory of a run is bounded, and no peak is lost.
"""

import re
from array import array
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal, NamedTuple

import numpy as np

from spmd_tx.coordinator.requests.runs.rollout_metrics import GROUPS, SAMPLED, TRAINED
from spmd_tx.coordinator.wire.console.runs import LoggedPoint, MetricsPoint, RunCurve

CurveAxis = Literal["step", "time"]

MOST_KEPT = 8192  # points of a column
MOST_POINTS = 1000  # of a curve; beyond it, BUCKETS
BUCKETS = 500
DIGITS = 7
FIELDS, BYTES_PER_POINT = 5, 40

LOSS, TOKENS = "loss:sum", "num_tokens:sum"
PER_TOKEN, SPEED, SAMPLING_SPEED = "loss per token", "tokens per second", "sampled tokens per second"
NO_VARIANCE = "groups without variance"
REDUCED = re.compile(r":(mean|sum|min|max)$")  # how the server's own metrics end

# Metrics in the order in which most readers want them; the others follow by their names.
REWARD = r"(^|/)reward"
ORDER = (
    REWARD,
    r"abs_advantage",
    r"^loss per token$",
    r"^groups without variance$",
    r"^answer",
    r"entropy",
    r"kl",
    r"grad_(norm|l2)(:|$)",
    r"tokens per second$",
    r"lag",
    r"learning_rate",
)


class CurveWindow(NamedTuple):
    """Selects a part of the horizontal axis."""

    axis: CurveAxis  # steps, or seconds since the first point of the run
    first: float
    last: float


class _Column:
    """Holds the values of one metric in the order of their arrival."""

    def __init__(self) -> None:
        self._values = array("d")  # of each point: step, time, mean, least, greatest

    def __len__(self) -> int:
        return len(self._values) // FIELDS

    def add(self, moments: np.ndarray, values: np.ndarray) -> None:
        """Add values, [points], with their steps and times, [points, 2]."""
        points = np.column_stack((moments, values, values, values))
        while len(points):
            room = MOST_KEPT - len(self)
            self._values.frombytes(points[:room].tobytes())
            points = points[room:]
            if len(points):
                self._halve()

    def replace_last(self, value: float) -> None:
        self._values[-3:] = array("d", (value, value, value))

    def points(self) -> np.ndarray:
        """Return [5, points] by step, the newest of each."""
        found = np.array(self._values).reshape(-1, FIELDS).T
        found = found[:, np.argsort(found[0], kind="stable")]
        return found[:, np.append(found[0, 1:] != found[0, :-1], True)]

    def _halve(self) -> None:
        points = self.points()
        halves = _merged(points, np.arange(0, points.shape[1], 2))
        self._values = array("d", np.ascontiguousarray(halves.T).tobytes())


class _News:
    """Gathers what points say, by metric."""

    def __init__(self) -> None:
        self._moments: list[tuple[float, float]] = []
        self._said = defaultdict[str, tuple[list[int], list[float | None]]](lambda: ([], []))

    def add(self, step: float, at: float, metrics: Mapping[str, float | None]) -> None:
        place = len(self._moments)
        self._moments.append((step, at))
        for name, value in metrics.items():
            places, values = self._said[name]
            places.append(place)
            values.append(value)

    def move_to(self, columns: dict[str, _Column]) -> None:
        """Add everything to the columns of the metrics; what is None, as NaN."""
        moments = np.array(self._moments, float)
        for name, (places, values) in self._said.items():
            if name not in columns:
                columns[name] = _Column()
            columns[name].add(moments[places], np.array(values, float))


class RunColumns:
    """Holds the metrics of a run, and where its next ones begin."""

    def __init__(self) -> None:
        self.after = self.logged_after = -1
        self._of_server: dict[str, _Column] = {}
        self._of_client: dict[str, _Column] = {}
        self._began = float("inf")
        self._last: MetricsPoint | None = None
        self._groups = 0.0  # of the newest samples; 0: nobody knows which have trained
        self._trained = 0.0

    @property
    def size(self) -> int:
        """The bytes of all columns."""
        columns = [*self._of_server.values(), *self._of_client.values()]
        return BYTES_PER_POINT * sum(map(len, columns))

    @property
    def names(self) -> list[str]:
        """The metrics, those that most readers want first."""
        return sorted({*self._of_server, *self._of_client}, key=reading_order)

    def add(self, points: Iterable[MetricsPoint]) -> None:
        """Add steps of the server, in their order, with what can be computed from them."""
        news = _News()
        for point in points:
            self._began = min(self._began, point.at)
            news.add(point.step, point.at, point.metrics | self._derived(point))
            self._add_groups(point)
            self.after, self._last = point.seq, point
        news.move_to(self._of_server)

    def add_logged(self, points: Iterable[LoggedPoint]) -> None:
        """Add what a client has sent of its own steps, in the order of arrival."""
        news = _News()
        for point in points:
            self._began = min(self._began, point.at)
            news.add(point.step, point.at, point.metrics)
            self.logged_after = point.number
        news.move_to(self._of_client)

    def curve(self, name: str, window: CurveWindow) -> RunCurve | None:
        """Return a metric within a window, and one point on both sides of it; None: it has none there."""
        columns = self._columns(name)
        if not columns:
            return None
        step, at, mean, least, greatest = np.concatenate([each.points() for each in columns], axis=1)
        x = step if window.axis == "step" else at - self._began
        points = np.stack([x, mean, least, greatest])[:, np.argsort(x, kind="stable")]
        inside = np.flatnonzero((points[0] >= window.first) & (points[0] <= window.last))
        if not len(inside):
            return None
        points = points[:, max(0, inside[0] - 1) : inside[-1] + 2]
        if points.shape[1] > MOST_POINTS:
            points = _merged(points, _starts(points[0]), x_rows=1)
        x, mean, least, greatest = points
        is_exact = np.array_equal(least, greatest, equal_nan=True)
        band = None if is_exact else _numbers(least), None if is_exact else _numbers(greatest)
        return RunCurve(name, [float(f"{value:.{DIGITS}g}") for value in x], _numbers(mean), *band)

    def moment(self, name: str, axis: CurveAxis, x: float) -> float | None:
        """Return when the point of a metric was made that is nearest to a place of an axis.

        The answer is in seconds since the epoch; None: there is no such metric.
        """
        columns = self._columns(name)
        if not columns:
            return None
        step, at = np.concatenate([each.points()[:2] for each in columns], axis=1)
        places = step if axis == "step" else at - self._began
        return float(at[np.argmin(np.abs(places - x))])

    def _columns(self, name: str) -> list[_Column]:
        """Return where a metric is: the server's own alone, where a client repeats it by its own count."""
        columns = [each[name] for each in (self._of_server, self._of_client) if name in each]
        return columns[:1] if REDUCED.search(name) else columns

    def _derived(self, point: MetricsPoint) -> dict[str, float | None]:
        metrics, found = point.metrics, dict[str, float | None]()
        tokens, loss = metrics.get(TOKENS), metrics.get(LOSS)
        if tokens and loss is not None:
            found[PER_TOKEN] = loss / tokens
        last = self._last  # of a thinned run, it need not be the step before
        seconds = 0.0 if last is None or point.step != last.step + 1 else point.at - last.at
        for name, total in ((SPEED, tokens), (SAMPLING_SPEED, metrics.get(SAMPLED))):
            if total is not None and seconds > 0:
                found[name] = total / seconds
        return found

    def _add_groups(self, point: MetricsPoint) -> None:
        """Say which share of the newest groups has not trained. They may train in several steps."""
        groups, trained = point.metrics.get(GROUPS), point.metrics.get(TRAINED)
        if groups and trained is None:
            self._groups = 0.0
        elif groups and trained is not None:
            self._groups, self._trained = groups, trained
            news = _News()
            news.add(point.step, point.at, {NO_VARIANCE: max(0.0, 1 - self._trained / groups)})
            news.move_to(self._of_server)
        elif trained and self._groups:
            self._trained += trained
            self._of_server[NO_VARIANCE].replace_last(max(0.0, 1 - self._trained / self._groups))


def reading_order(name: str) -> tuple[int, str]:
    """Return the key by which metrics are sorted, those that most readers want first."""
    return next((place for place, each in enumerate(ORDER) if re.search(each, name)), len(ORDER)), name


def _starts(x: np.ndarray) -> np.ndarray:
    """Return where each of the buckets begins that lie evenly on the axis and have points."""
    places = np.minimum((x - x[0]) / ((x[-1] - x[0]) or 1.0) * BUCKETS, BUCKETS - 1).astype(np.int64)
    return np.flatnonzero(np.append(True, places[1:] != places[:-1]))


def _merged(points: np.ndarray, starts: np.ndarray, x_rows: int = 2) -> np.ndarray:
    """Merge runs of points [x_rows of places, mean, least, greatest], without what is not finite."""
    lengths = np.diff(np.append(starts, points.shape[1]))
    mean = points[x_rows]
    known = np.isfinite(mean)
    counts = np.add.reduceat(known.astype(float), starts)
    sums = np.add.reduceat(np.where(known, mean, 0.0), starts)
    with np.errstate(invalid="ignore"):
        means = np.where(counts > 0, sums / np.maximum(counts, 1), np.nan)
    return np.stack(
        [
            *(np.add.reduceat(row, starts) / lengths for row in points[:x_rows]),
            means,
            np.fmin.reduceat(points[x_rows + 1], starts),
            np.fmax.reduceat(points[x_rows + 2], starts),
        ]
    )


def _numbers(values: np.ndarray) -> list[float | None]:
    return [float(f"{value:.{DIGITS}g}") if np.isfinite(value) else None for value in values.tolist()]


def chosen(columns: RunColumns, names: Sequence[str], most: int) -> list[str]:
    """Return the names to draw: those that were asked for, or the first ones."""
    known: Mapping[str, None] = dict.fromkeys(columns.names)
    return [name for name in names if name in known] if names else list(known)[:most]
