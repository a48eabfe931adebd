// From curves to what is drawn: their names, smoothing, rounding, CSV.
import type { LoggedPoint, MetricsPoint, Run } from "../api_types";

export type Axis = "step" | "time";
export type Zoom = [number, number]; // on the horizontal axis
export type Value = number | null; // null: not finite
type Metrics = Record<string, Value>;

/** What is asked for. Without names the server chooses. */
export interface View {
  axis: Axis;
  zoom: Zoom | null;
  names: string[];
}

export const MOST_CHARTS = 64; // that are asked for at once
export const OVERVIEW = 12; // charts where nothing is asked for, as many as the server chooses for each run
export const AUTOMATIC = 0.8; // weight of the past in curves that are noise
export const NOISE = 1e-6;

const LOSS = "loss per token";
const REWARD = /(^|\/)reward/; // as clients name it: reward, reward/total, env/all/reward/total
const MAY_BE_TINY = /learning_rate|(^|[/_])(lr|eps|decay)/;
const LEAST_NOISY = 20; // points

function loss(metrics: Metrics): Value {
  const total = metrics["loss:sum"];
  const tokens = metrics["num_tokens:sum"];
  return total != null && tokens ? total / tokens : null;
}

/** The metric that tells best how a run goes, with its newest value. */
export function headline(run: Run): [string, Value] | null {
  const reward = Object.keys(run.last)
    .filter((name) => REWARD.test(name))
    .sort((a, b) => a.length - b.length || (a < b ? -1 : 1))[0];
  if (reward !== undefined) return [reward, run.last[reward] ?? null];
  const perToken = loss(run.last);
  return perToken === null ? null : [LOSS, rounded(LOSS, perToken)];
}

// The server's own metrics in words. A name of the client's stands for itself.
const TITLES = new Map([
  ["abs_advantage:mean", "size of the advantages"],
  ["answer_tokens:mean", "tokens of an answer"],
  ["answers_cut_off:mean", "share of answers cut off"],
  ["entropy:mean", "entropy"],
  ["groups_sampled:sum", "prompts with several answers"],
  ["groups_trained:sum", "prompts whose answers differ in reward"],
  ["kl:mean", "distance from the weights that sampled (KL)"],
  ["learning_rate:mean", "learning rate"],
  ["loss:sum", "loss of all tokens"],
  ["num_tokens:sum", "tokens trained on"],
  ["sampled_tokens:sum", "tokens sampled"],
  ["sampler_lag:mean", "steps that the sampler is behind"],
  ["unclipped_grad_l2:mean", "norm of the gradient"],
]);

/** What a metric of the server is, in words; null: its name says it. */
export function metricTitle(name: string): string | null {
  return TITLES.get(name) ?? null;
}

/** The names of several runs in one order, which is that of the server for each of them. */
export function allNames(runs: string[][]): string[] {
  return [...new Set([...runs].sort((a, b) => b.length - a.length).flat())];
}

/** Those names that are first in the list of any run. */
export function firstNames(runs: string[][], most: number): Set<string> {
  const places = new Map<string, number>();
  for (const names of runs) {
    for (const [i, name] of names.entries()) places.set(name, Math.min(i, places.get(name) ?? i));
  }
  return new Set([...places.keys()].sort((a, b) => places.get(a)! - places.get(b)!).slice(0, most));
}

/** Whether a number is nothing but rounding. Rates may be as small as they like. */
export function isRounding(name: string, value: Value): boolean {
  return value !== null && Math.abs(value) < NOISE && !MAY_BE_TINY.test(name);
}

/** A number as tables have it: 0 where it is nothing but rounding. */
export function rounded(name: string, value: Value): Value {
  return isRounding(name, value) ? 0 : value;
}

/** The weight of the past for a curve: the one that was chosen, or one that depends on its noise. */
export function weightOf(values: Value[], chosen: number | null): number {
  if (chosen !== null) return chosen;
  const known = values.filter((value) => value !== null);
  if (known.length < LEAST_NOISY) return 0;
  const steps = known.slice(1).map((value, i) => value - known[i]!);
  const turns = steps.slice(1).filter((step, i) => step * steps[i]! < 0).length;
  return turns > known.length / 3 ? AUTOMATIC : 0;
}

/** The value at an index, or the newest one before it: runs need not have the same steps. */
export function valueAt(values: (Value | undefined)[], index: number): Value {
  for (let i = index; i >= 0; i--) if (values[i] != null) return values[i]!;
  return null;
}

/** The weight of the past, as an address or a slider has it; null where it makes no sense. */
export function smoothingWeight(text: string | null): number | null {
  const value = Number(text);
  return text && value >= 0 && value <= 0.99 ? value : null;
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

/** The points as text, a row per step of the server and a row per message of the client. */
export function csv(runs: [string, MetricsPoint[], LoggedPoint[]][]): string {
  const counted = runs.flatMap(([id, points, logged]) => [
    ...points.map((point) => ({ id, point, countedBy: "server" })),
    ...logged.map((point) => ({ id, point, countedBy: "client" })),
  ]);
  const names = [...new Set(counted.flatMap(({ point }) => Object.keys(point.metrics)))].sort();
  // Spreadsheets take a name that begins with = or the like for a formula, so it gets an apostrophe.
  const harmless = (text: string) => (/^[=+\-@\t\r]/.test(text) ? `'${text}` : text);
  const quoted = (text: string) => (/[",\r\n]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text);
  const value = (metrics: Metrics, name: string) => (Object.hasOwn(metrics, name) ? (metrics[name] ?? "") : "");
  const rows = counted.map(({ id, point, countedBy }) =>
    [id, point.step, point.at, ...names.map((name) => value(point.metrics, name)), countedBy].join(","),
  );
  const head = ["run", "step", "at", ...names.map((name) => quoted(harmless(name))), "counted by"].join(",");
  return [head, ...rows, ""].join("\n");
}
