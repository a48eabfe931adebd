// The times of requests: lanes without overlaps, gaps, and sums by stage. Times are in seconds since the epoch.
import type { RunTiming, Share, TimedRequest } from "../api_types";

export type Cause = Share["cause"];
export type Stage = TimedRequest["stages"][number][0];
type Staged = Pick<TimedRequest, "stages">;

export const STAGES: readonly Stage[] = ["queued", "batched", "compiling", "device", "encoded"]; // in order of time
export const STAGE_NAMES: Record<Stage, string> = {
  queued: "In line",
  batched: "Ready",
  compiling: "Compiling",
  device: "Computing",
  encoded: "Storing",
};
export const CAUSES: readonly Cause[] = ["device", "queue", "compile", "client", "restart", "server"];
export const CAUSE_NAMES: Record<Cause, string> = {
  device: "Computing",
  queue: "Other runs first",
  compile: "Compiling",
  client: "Waiting for the client",
  restart: "Workers starting",
  server: "Server's own work",
};

const begin = ({ stages }: Staged) => stages[0]?.[1] ?? 0;
const end = ({ stages }: Staged) => stages.at(-1)?.[2] ?? 0;

/** Puts each request into the first lane that is free when it begins. */
export function lanes<Request extends Staged>(requests: Request[]): Request[][] {
  const packed: { freeAt: number; requests: Request[] }[] = [];
  for (const request of [...requests].sort((a, b) => begin(a) - begin(b))) {
    const lane = packed.find(({ freeAt }) => freeAt <= begin(request));
    lane?.requests.push(request);
    if (lane) lane.freeAt = end(request);
    else packed.push({ freeAt: end(request), requests: [request] });
  }
  return packed.map((lane) => lane.requests);
}

type Window = Pick<RunTiming, "since" | "until" | "is_cut"> & { requests: Staged[] };

/** The times without an unfinished request. Before the first of a list that was cut, nothing is known. */
export function gaps({ requests, since, until, is_cut }: Window): [number, number][] {
  const spans = requests.map((request): [number, number] => [begin(request), end(request)]).sort((a, b) => a[0] - b[0]);
  const free: [number, number][] = [];
  let busyUntil = is_cut ? (spans[0]?.[0] ?? until) : since;
  for (const [began, ended] of [...spans, [until, until] as const]) {
    if (began > busyUntil) free.push([busyUntil, began]);
    busyUntil = Math.max(busyUntil, ended);
  }
  return free;
}

export interface TimeTaken<Request> {
  request: Request;
  seconds: Partial<Record<Stage, number>>; // of the stages that it had
  total: number;
}

/** The requests that took longest, with the seconds of each of their stages; the slowest first. */
export function slowest<Request extends Staged>(requests: Request[], count: number): TimeTaken<Request>[] {
  const timed = requests.map((request) => {
    const seconds: Partial<Record<Stage, number>> = {};
    for (const [stage, began, ended] of request.stages) seconds[stage] = (seconds[stage] ?? 0) + ended - began;
    return { request, seconds, total: Object.values(seconds).reduce((sum, part) => sum + part, 0) };
  });
  return timed.sort((a, b) => b.total - a.total).slice(0, count);
}

export interface Column {
  cause: Cause;
  x: number;
  y: number; // of its upper end; the others stand on it
  width: number;
  height: number;
}

type Sliced = Pick<RunTiming, "slices" | "since" | "until">;

/** One column for each slice of a window, of the shares of the causes in it. Those without time are left out. */
export function columns({ slices, since, until }: Sliced, width: number, height: number): Column[] {
  const scale = width / (until - since);
  return slices.flatMap((slice, i) => {
    const whole = (slices[i + 1]?.at ?? until) - slice.at;
    let y = height;
    return CAUSES.flatMap((cause) => {
      const tall = whole > 0 ? (height * (slice.seconds[cause] ?? 0)) / whole : 0;
      y -= tall;
      const place = { x: (slice.at - since) * scale, y, width: Math.max(0.5, whole * scale - 1), height: tall };
      return tall > 0 ? [{ cause, ...place }] : [];
    });
  });
}
