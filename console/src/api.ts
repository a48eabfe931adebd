// The routes under /console/api, and those of the SDK that pages use. Decides nothing about how things are shown.
import { signal } from "@preact/signals";
import type { LoggedPoint, MetricsPoint, paths, Run, SignedIn } from "./api_types";
import { filled, url, type Parameters } from "./logic/addresses";
import type { RunOrder } from "./logic/runs";
import type { SampleOrder } from "./logic/samples";
import type { Axis, View } from "./logic/series";

type Route = keyof paths;
type ParametersOf<R extends Route> = Pick<paths[R]["get"]["parameters"], "path" | "query">;
type Answer<R extends Route> = paths[R]["get"]["responses"][200]["content"]["application/json"];

export class Refused extends Error {
  constructor(
    readonly status: number,
    message: string,
  ) {
    super(message);
  }
}

const TRIES = 3; // after the first
const BUSY_SECONDS = 2;

export const mustSignIn = signal(false);
export const signIns = signal(0); // pages load anew after each
let key: string | null = null; // kept in this tab's memory, for servers that give no cookie

export async function request(method: string, path: string, body?: unknown, signal?: AbortSignal): Promise<Response> {
  const signedIn = signIns.value;
  const headers: Record<string, string> = {};
  if (key) headers["X-Api-Key"] = key;
  if (method !== "GET") headers["X-Console"] = "1";
  if (body !== undefined) headers["Content-Type"] = "application/json";
  const response = await fetch(path, {
    method,
    headers,
    body: body === undefined ? null : JSON.stringify(body),
    signal: signal ?? null,
  });
  if (response.ok) return response;
  // A late answer to what was asked before a sign-in says nothing of the new key.
  if (response.status === 401 && signIns.value === signedIn) mustSignIn.value = true;
  throw new Refused(response.status, await reason(response));
}

async function reason(response: Response): Promise<string> {
  try {
    const answer = await response.json();
    const error = answer.error?.message ?? answer.error ?? answer.detail;
    if (typeof error === "string") return error;
  } catch {
    // The body is no JSON; the status must do.
  }
  return `the server answered ${response.status}`;
}

/** Asks for something to be shown, and again where the server has too many answers to make at the moment. */
export async function get<R extends Route>(route: R, parameters?: ParametersOf<R>): Promise<Answer<R>> {
  const address = filled(route, parameters as Parameters);
  for (let left = TRIES; ; left--) {
    try {
      return await (await request("GET", address)).json();
    } catch (error) {
      if (!(error instanceof Refused) || error.status !== 429 || left === 0) throw error;
      await new Promise((wake) => setTimeout(wake, 1000 * BUSY_SECONDS));
    }
  }
}

/** Signs in with a key. Raises Refused where the server does not know it. */
export async function signIn(candidate: string): Promise<void> {
  key = null;
  try {
    await request("POST", "/console/api/session", { api_key: candidate });
  } catch (error) {
    if (!(error instanceof Refused) || ![404, 405].includes(error.status)) throw error;
    key = candidate;
    try {
      await get("/console/api/runs", { query: { limit: 1 } });
    } catch (refused) {
      key = null;
      throw refused;
    }
  }
  mustSignIn.value = false;
  signIns.value++;
}

/** Forgets the key in this browser. */
export async function signOut(): Promise<void> {
  await request("DELETE", "/console/api/session").catch(() => undefined);
  key = null;
  caller.value = null;
  mustSignIn.value = true;
}

export const caller = signal<SignedIn | null>(null); // null: not known yet, or not signed in

/** Asks who uses this page. */
export async function identify(): Promise<void> {
  const signedIn = signIns.value;
  const found = await get("/console/api/session").catch(() => null);
  if (signIns.value === signedIn) caller.value = found;
}

/** The curves of a run within a part of its axis. */
export const getCurves = (run_id: string, { axis, zoom, names }: View) =>
  get("/console/api/runs/{run_id}/curves", {
    path: { run_id },
    query: { axis, first: zoom?.[0] ?? null, last: zoom?.[1] ?? null, name: names },
  });

const RUNS = 50; // of a page
const SAMPLES = 20; // requests of a page
const POINTS = 5000; // of a page

export const getServer = () => get("/console/api/server");
export const getKeys = () => get("/console/api/keys");
export const getUse = (hours: number) => get("/console/api/usage", { query: { hours } });

/** The events of a day, UTC, by the route that the SDK uses. */
export const getAudit = (day: string) => get("/api/v1/audit", { query: { day } });

/** Lists checkpoints, newest first, with what was known of their runs when they were saved. */
export const listSavedCheckpoints = (run: string | null, metric: string, offset: number) =>
  get("/console/api/checkpoints", { query: { run, metric: metric || null, offset } });

/** Lists checkpoints, newest first, by the route that the SDK uses. */
export const listCheckpoints = (offset: number, limit: number) =>
  get("/api/v1/checkpoints", { query: { offset, limit } });

/** Lists runs from a place on, as the server searches and sorts them. */
export const listRuns = (order: Partial<RunOrder> = {}, cursor = 0) =>
  get("/console/api/runs", { query: { limit: RUNS, cursor, ...order } });
/** How the newest runs are whose sessions are open. */
export const getOpenRuns = () => get("/console/api/open_runs");
export const getRun = (run_id: string) => get("/console/api/runs/{run_id}", { path: { run_id } });

/** Under what a run is listed; what is left out stays as it is, and null takes a label away. */
export interface RunChange {
  name?: string | null;
  group?: string | null;
  archived?: boolean;
}

export const changeRun = async (run: string, change: RunChange): Promise<Run> =>
  (await request("PATCH", url`/console/api/runs/${run}`, change)).json();

export const getTiming = (run_id: string, seconds: number) =>
  get("/console/api/runs/{run_id}/timing", { path: { run_id }, query: { seconds } });

/** A point of a curve: its metric, and where it is on the axis. */
export interface CurvePoint {
  metric: string;
  axis: Axis;
  x: number;
}

/** Which samples of a run are listed, and in which order. */
export interface SampleChoice {
  search: string; // a text that they have; empty: any
  point: CurvePoint | null; // of a curve, from before which on they are; null: all
  prompt_of: string | null; // a request whose prompt they have; null: any
  order: SampleOrder;
}

/** Lists samples, from a place on that the page before has told. */
export const listSamples = (run_id: string, { search, point, ...choice }: SampleChoice, start: number | null) =>
  get("/console/api/runs/{run_id}/samples", {
    path: { run_id },
    query: { limit: SAMPLES, search: search || undefined, start, ...choice, ...point },
  });

export const getSampleGroup = (run_id: string, request_id: string) =>
  get("/console/api/runs/{run_id}/samples/{request_id}", { path: { run_id, request_id } });

/** Lists trajectories, a page of them, by the route that clients use. */
export const listTrajectories = (query: NonNullable<paths["/api/v1/trajectories"]["get"]["parameters"]["query"]>) =>
  get("/api/v1/trajectories", { query });

/** A trajectory with all of its turns, without what was said. */
export const outlineTrajectory = (trajectory_id: string) =>
  get("/api/v1/trajectories/{trajectory_id}", { path: { trajectory_id }, query: { outline: true } });

/** The turns of some requests, with messages and tokens. */
export const readTurns = (trajectory_id: string, requests: string[]) =>
  get("/api/v1/trajectories/{trajectory_id}", {
    path: { trajectory_id },
    query: { tokens: true, turns_of: requests.join() },
  });

/** Gives what is behind a seq of the server and a number of the client, oldest first, page by page. */
export async function* metricPages(
  run_id: string,
  after?: number,
  logged_after?: number,
): AsyncGenerator<{ points: MetricsPoint[]; logged: LoggedPoint[] }> {
  for (let more = true; more; ) {
    const page = await get("/console/api/runs/{run_id}/metrics", {
      path: { run_id },
      query: { limit: POINTS, after, logged_after },
    });
    const { points, logged = [] } = page;
    if (points.length || logged.length) yield { points, logged };
    more = page.next_after != null || page.next_logged_after != null;
    after = points.at(-1)?.seq ?? after;
    logged_after = logged.at(-1)?.number ?? logged_after;
  }
}
