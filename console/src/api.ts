// The routes under /console/api, with their types. Decides nothing about how things are shown.
import { signal } from "@preact/signals";

export type Value = number | null; // null: not finite

export interface Run {
  id: string;
  session_id: string;
  base_model: string;
  rank: number;
  owner: string;
  created_at: number; // seconds since the epoch
  is_open: boolean;
  metadata: Record<string, unknown> | null; // as the client sent it
  steps: number;
  last_at: number | null;
  last: Record<string, Value>;
}

export interface Point {
  seq: number;
  step: number;
  at: number; // seconds since the epoch
  metrics: Record<string, Value>;
}

export class Refused extends Error {
  constructor(
    readonly status: number,
    message: string,
  ) {
    super(message);
  }
}

export const mustSignIn = signal(false);
export const signIns = signal(0); // pages load anew after each
let key: string | null = null; // kept in this tab's memory, for servers that give no cookie

export async function request(method: string, path: string, body?: unknown): Promise<Response> {
  const headers: Record<string, string> = {};
  if (key) headers["X-Api-Key"] = key;
  if (method !== "GET") headers["X-Console"] = "1";
  if (body !== undefined) headers["Content-Type"] = "application/json";
  const response = await fetch(path, { method, headers, body: body === undefined ? null : JSON.stringify(body) });
  if (response.ok) return response;
  if (response.status === 401) mustSignIn.value = true;
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

export async function get<T>(path: string): Promise<T> {
  return (await request("GET", path)).json();
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
      await get("/console/api/runs?limit=1");
    } catch (refused) {
      key = null;
      throw refused;
    }
  }
  mustSignIn.value = false;
  signIns.value++;
}

export function listRuns(cursor: number | null): Promise<{ runs: Run[]; next_cursor: number | null }> {
  return get(`/console/api/runs?limit=50${cursor === null ? "" : `&cursor=${cursor}`}`);
}

export function getRun(id: string): Promise<Run> {
  return get(`/console/api/runs/${encodeURIComponent(id)}`);
}

/** Gives the points after `after`, oldest first, page by page. */
export async function* metricPages(id: string, after: number | null): AsyncGenerator<Point[]> {
  for (let next = after, more = true; more; ) {
    const query = next === null ? "" : `&after=${next}`;
    const page: { points: Point[]; next_after: number | null } = await get(
      `/console/api/runs/${encodeURIComponent(id)}/metrics?limit=5000${query}`,
    );
    if (page.points.length) yield page.points;
    more = page.next_after !== null && page.next_after !== next;
    next = page.next_after;
  }
}
