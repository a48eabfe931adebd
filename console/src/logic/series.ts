// From points to curves: derived metrics, the order of metrics, smoothing, CSV.
import type { LoggedPoint, MetricsPoint, Run } from "../api_types";

export type Axis = "step" | "time";
export type Value = number | null; // null: not finite
type Metrics = Record<string, Value>;

/** A point of a chart: one of the server's steps, or of the client's own. */
export interface ChartPoint {
  step: number;
  at: number; // seconds since the epoch
  metrics: Metrics;
  countedBy: "server" | "client";
}

export interface Curve {
  x: number[];
  y: Value[];
}

const LOSS = "loss per token";
const SPEED = "tokens per second";
const SAMPLING_SPEED = "sampled tokens per second";
const REWARD = /(^|\/)reward/; // as clients name it: reward, reward/total, env/all/reward/total
const FIRST = [
  REWARD,
  /advantage/,
  /^loss per token$/,
  /groups/,
  /answer/,
  /entropy/,
  /kl/,
  /grad/,
  /tokens per second$/,
  /lag/,
  /learning_rate/,
];

function loss(metrics: Metrics): Value {
  const total = metrics["loss:sum"];
  const tokens = metrics["num_tokens:sum"];
  return total != null && tokens ? total / tokens : null;
}

/** Adds what can be computed from the metrics of a step and the time of the step before. */
export function withDerived(points: MetricsPoint[], before: MetricsPoint | undefined): MetricsPoint[] {
  return points.map((point, i) => {
    const last = points[i - 1] ?? before;
    const tokens = point.metrics["num_tokens:sum"];
    const metrics = { ...point.metrics };
    const perToken = loss(metrics);
    if (perToken !== null) metrics[LOSS] = perToken;
    const sampled = point.metrics["sampled_tokens:sum"];
    const seconds = last ? point.at - last.at : 0;
    if (tokens != null && seconds > 0) metrics[SPEED] = tokens / seconds;
    if (sampled != null && seconds > 0) metrics[SAMPLING_SPEED] = sampled / seconds;
    return { ...point, metrics };
  });
}

/** Adds what a client has sent to what it sent before, by its steps: later metrics of a step add to it. */
export function addLogged(byStep: Map<number, LoggedPoint>, news: LoggedPoint[]): void {
  for (const point of news) {
    const before = byStep.get(point.step);
    byStep.set(point.step, before ? { ...before, metrics: { ...before.metrics, ...point.metrics } } : point);
  }
}

/** The server's steps, then the client's, each in their order. */
export function chartPoints(points: MetricsPoint[], logged: Iterable<LoggedPoint>): ChartPoint[] {
  const ofClient = [...logged].sort((a, b) => a.step - b.step);
  return [
    ...points.map((point) => ({ ...point, countedBy: "server" as const })),
    ...ofClient.map((point) => ({ ...point, countedBy: "client" as const })),
  ];
}

/** The metric that tells best how a run goes, with its newest value. */
export function headline(run: Run): [string, Value] | null {
  const reward = Object.keys(run.last)
    .filter((name) => REWARD.test(name))
    .sort((a, b) => a.length - b.length || (a < b ? -1 : 1))[0];
  if (reward !== undefined) return [reward, run.last[reward] ?? null];
  const perToken = loss(run.last);
  return perToken === null ? null : [LOSS, perToken];
}

/** All names in these points, those that most readers want first. */
export function metricNames(runs: Iterable<ChartPoint[]>): string[] {
  const names = new Set<string>();
  for (const points of runs) for (const point of points) for (const name in point.metrics) names.add(name);
  const rank = (name: string) => {
    const at = FIRST.findIndex((pattern) => pattern.test(name));
    return at < 0 ? FIRST.length : at;
  };
  return [...names].sort((a, b) => rank(a) - rank(b) || (a < b ? -1 : 1));
}

/** The values of a metric, in the order of the axis: clients need not send their steps in order. */
export function curve(points: ChartPoint[], name: string, axis: Axis): Curve {
  const start = points.reduce((least, point) => Math.min(least, point.at), Infinity);
  const values = new Map<number, Value>();
  for (const point of points) {
    if (Object.hasOwn(point.metrics, name))
      values.set(axis === "step" ? point.step : point.at - start, point.metrics[name] ?? null);
  }
  const pairs = [...values].sort(([a], [b]) => a - b);
  return { x: pairs.map(([x]) => x), y: pairs.map(([, y]) => y) };
}

/** The value at an index, or the newest one before it: runs need not have the same steps. */
export function valueAt(values: (Value | undefined)[], index: number): Value {
  for (let i = index; i >= 0; i--) if (values[i] != null) return values[i]!;
  return null;
}

/** The weight of the past, as an address or a slider has it; 0 where it makes no sense. */
export function smoothingWeight(text: string | null): number {
  const value = Number(text);
  return value > 0 && value <= 0.99 ? value : 0;
}

/** Exponential moving average without the bias towards zero at its start; gaps stay gaps. */
export function smooth(values: Value[], weight: number): Value[] {
  let sum = 0;
  let mass = 0;
  return values.map((value) => {
    if (value === null) return null;
    sum = weight * sum + (1 - weight) * value;
    mass = weight * mass + (1 - weight);
    return sum / mass;
  });
}

/** The points as text, a row per step of the server or of the client. */
export function csv(runs: [string, ChartPoint[]][]): string {
  const names = metricNames(runs.map(([, points]) => points));
  // Spreadsheets take a name that begins with = or the like for a formula, so it gets an apostrophe.
  const harmless = (text: string) => (/^[=+\-@\t\r]/.test(text) ? `'${text}` : text);
  const quoted = (text: string) => (/[",\r\n]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text);
  const value = (point: ChartPoint, name: string) =>
    Object.hasOwn(point.metrics, name) ? (point.metrics[name] ?? "") : "";
  const rows = runs.flatMap(([id, points]) =>
    points.map((point) =>
      [id, point.step, point.at, ...names.map((name) => value(point, name)), point.countedBy].join(","),
    ),
  );
  const head = ["run", "step", "at", ...names.map((name) => quoted(harmless(name))), "counted by"].join(",");
  return [head, ...rows, ""].join("\n");
}
