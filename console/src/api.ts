// The routes under /console/api, and those of the SDK that pages use, with their types. Decides nothing about how things are shown.
import { signal } from "@preact/signals";
import { url } from "./router";

export type Value = number | null; // null: not finite

export interface Run {
  id: string;
  session_id: string;
  base_model: string;
  rank: number;
  owner: string;
  created_at: number; // seconds since the epoch
  is_open: boolean;
  silent_seconds: number | null; // since the last heartbeat of its client; null: it is not late
  metadata: Record<string, unknown> | null; // as the client sent it
  display_name: string | null; // of its session
  steps: number;
  last_at: number | null;
  last: Record<string, Value>;
}

/** One of the server's steps. */
export interface Point {
  seq: number;
  step: number;
  at: number; // seconds since the epoch
  metrics: Record<string, Value>;
}

/** What a client has sent of one of its own steps; a later one of the same step adds to it. */
export interface Logged {
  number: number; // in the order of arrival
  step: number; // as the client counts
  at: number;
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

const TRIES = 3; // after the first
const BUSY_SECONDS = 2;

export const mustSignIn = signal(false);
export const signIns = signal(0); // pages load anew after each
let key: string | null = null; // kept in this tab's memory, for servers that give no cookie

export async function request(method: string, path: string, body?: unknown, signal?: AbortSignal): Promise<Response> {
  const headers: Record<string, string> = {};
  if (key) headers["X-Api-Key"] = key;
  if (method !== "GET") headers["X-Console"] = "1";
  if (body !== undefined) headers["Content-Type"] = "application/json";
  const response = await fetch(path, { method, headers, body: body === undefined ? null : JSON.stringify(body), signal: signal ?? null });
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

/** Asks for something to be shown, and again where the server has too many answers to make at the moment. */
export async function get<T>(path: string): Promise<T> {
  for (let left = TRIES; ; left--) {
    try {
      return await (await request("GET", path)).json();
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
      await get("/console/api/runs?limit=1");
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

export interface Caller {
  owner: string;
  role: "user" | "admin" | "read-only";
  is_read_only: boolean;
  needs_key: boolean;
}

export const caller = signal<Caller | null>(null); // null: not known yet, or not signed in

/** Asks who uses this page. */
export async function identify(): Promise<void> {
  caller.value = await get<Caller>("/console/api/session").catch(() => null);
}

export interface Server {
  version: string;
  model: string;
  started_at: number;
  now: number;
  phase: string;
  is_ready: boolean;
  refusal: string | null; // why no new work is taken
  mesh: Record<string, number>; // sizes by axis
  device: string | null;
  hosts: string[]; // of each process
  generations: { number: number; began_at: number; ready_at: number | null; ended_at: number | null; reason: string | null }[];
  programs: {
    ready: number;
    planned: number;
    compiling: string | null;
    recent: { program: string; seconds: number; ended_at: number; waiting: number; error: string | null }[];
  };
  memory: { device_bytes: number; uses: { use: string; bytes: number; note: string }[]; choices: [string, string][] } | null;
  window_seconds: number;
  tenants: {
    owner: string;
    waiting: number;
    running: number;
    oldest_seconds: number | null;
    finished: number;
    wait_median: number | null; // seconds
    wait_most: number | null;
    tokens: number;
    device_share: number;
  }[];
  throughput: { at: number; trained: number; sampled: number; busy: number }[];
  disk: { free_bytes: number | null; bytes_by_kind: Record<string, number>; problem: string | null };
  queue: { id: string; kind: string; line: string; owner: string; seconds: number; is_running: boolean; reason: string | null }[];
  queue_length: number;
  suspects: { id: string; kind: string; line: string; owner: string; state: string; losses: number; coordinator_losses: number; reason: string | null }[];
}

export function getServer(): Promise<Server> {
  return get("/console/api/server");
}

export interface Key {
  id: string;
  owner: string;
  role: Caller["role"];
  created_at: number;
  expires_at: number | null;
  last_used_at: number | null;
  limits: Record<string, number>;
  problem: string | null; // null: it is valid
  is_own: boolean;
}

export interface HourOfUse {
  hour: number; // its first second
  owner: string;
  trained: number; // tokens, here and below
  forwarded: number;
  prompt: number;
  cached: number;
  sampled: number;
}

export interface Use {
  since: number;
  until: number;
  hours: HourOfUse[];
  is_cut: boolean;
}

export interface AuditEntry {
  timestamp: string; // RFC 3339
  event: string;
  event_details: Record<string, unknown>;
}

export function getKeys(): Promise<{ keys: Key[]; left_out: number }> {
  return get("/console/api/keys");
}

export function getUse(hours: number): Promise<Use> {
  return get(url`/console/api/usage?hours=${hours}`);
}

/** The events of a day, UTC, by the route that the SDK uses. */
export function getAudit(day: string): Promise<{ entries: AuditEntry[]; next_before: number | null }> {
  return get(url`/api/v1/audit?day=${day}`);
}

export interface Checkpoint {
  tinker_path: string;
  checkpoint_type: "training" | "sampler" | "external";
  time: string; // RFC 3339, as expires_at
  size_bytes: number | null;
  public: boolean;
  user_metadata: Record<string, unknown> | null;
  expires_at: string | null;
  base_model: string | null;
}

/** Lists checkpoints, newest first, by the route that the SDK uses. */
export function listCheckpoints(offset: number, limit: number): Promise<{ checkpoints: Checkpoint[]; cursor: { total_count: number } | null }> {
  return get(url`/api/v1/checkpoints?offset=${offset}&limit=${limit}`);
}

export function listRuns(cursor: number | null): Promise<{ runs: Run[]; next_cursor: number | null }> {
  return get(cursor === null ? "/console/api/runs?limit=50" : url`/console/api/runs?limit=50&cursor=${cursor}`);
}

export function getRun(id: string): Promise<Run> {
  return get(url`/console/api/runs/${id}`);
}

export type Cause = "device" | "queue" | "compile" | "client" | "restart" | "server";
export type StageName = "queued" | "batched" | "compiling" | "device" | "encoded";

export interface TimedRequest {
  number: number;
  kind: string;
  line: string;
  seq_id: number;
  stages: [StageName, number, number][]; // begin and end, seconds since the epoch
  state: "unfinished" | "finished" | "failed";
  tokens: number | null;
  reason: string | null; // why it waits
}

export interface Timing {
  since: number;
  until: number;
  summary: string;
  shares: { cause: Cause; seconds: number; advice: string }[]; // largest first
  slices: { at: number; seconds: Record<Cause, number> }[]; // oldest first
  requests: TimedRequest[]; // in order of acceptance
  is_cut: boolean;
}

export function getTiming(id: string, seconds: number): Promise<Timing> {
  return get(url`/console/api/runs/${id}/timing?seconds=${seconds}`);
}

export interface Excerpt {
  text: string;
  tokens: number; // of the whole
  is_cut: boolean;
}

export interface SampledRequest {
  id: string;
  number: number;
  group: string; // the same for requests of one prompt to one sampler
  at: number;
  weights: string | null; // null: the base model
  steps: number | null;
  prompt: Excerpt | null; // its end; null: not kept
  temperature: number;
  samples: { excerpt: Excerpt; stop_reason: StopReason; mean_logprob: number | null }[];
  num_samples: number;
  error: string | null;
}

export type StopReason = "stop" | "length";

export interface SamplesPage {
  requests: SampledRequest[]; // newest first
  looked_at: number;
  next_before: number | null;
  kept_hours: number;
}

export interface TokenTexts {
  tokens: number[];
  texts: string[];
  logprobs: Value[] | null; // nats
  left_out: number;
  left_out_at: number;
}

export interface Sample {
  request_id: string;
  place: number;
  at: number;
  stop_reason: StopReason;
  mean_logprob: number | null;
  content: TokenTexts;
}

export interface SampleGroup {
  weights: string | null;
  steps: number | null;
  prompt: TokenTexts;
  temperature: number;
  top_p: number;
  top_k: number;
  max_tokens: number | null;
  samples: Sample[];
  left_out: number;
  not_read: number; // requests that may have the same prompt
  errors: string[];
}

export function listSamples(id: string, search: string, before: number | null): Promise<SamplesPage> {
  const query = new URLSearchParams({ limit: "20", ...(search && { search }), ...(before !== null && { before: String(before) }) });
  return get(url`/console/api/runs/${id}/samples` + `?${query}`);
}

export function getSampleGroup(id: string, request: string): Promise<SampleGroup> {
  return get(url`/console/api/runs/${id}/samples/${request}`);
}

interface MetricsPage {
  points: Point[];
  next_after: number | null;
  logged?: Logged[]; // absent: none
  next_logged_after?: number;
}

/** Gives what is behind two places, oldest first, page by page. */
export async function* metricPages(id: string, after: number | null, loggedAfter: number | null): AsyncGenerator<{ points: Point[]; logged: Logged[] }> {
  for (let more = true; more; ) {
    const places = [["limit", 5000], ["after", after], ["logged_after", loggedAfter]].flatMap(([name, place]) => (place === null ? [] : [`${name}=${place}`]));
    const page: MetricsPage = await get(url`/console/api/runs/${id}/metrics?` + places.join("&"));
    const { points, logged = [] } = page;
    if (points.length || logged.length) yield { points, logged };
    more = page.next_after !== null || page.next_logged_after !== undefined;
    after = points.at(-1)?.seq ?? after;
    loggedAfter = logged.at(-1)?.number ?? loggedAfter;
  }
}
