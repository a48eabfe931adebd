// Runs as a list shows them: their names and states, and which answer counts.
import type { OpenRunsResponse, paths, Run, RunHealth } from "../api_types";

type Query = Required<NonNullable<paths["/console/api/runs"]["get"]["parameters"]["query"]>>;
export type RunSort = Query["sort"];

/** Which runs are listed, and in which order. */
export interface RunOrder {
  search: string;
  sort: RunSort;
  ascending: boolean;
  archived: boolean; // whether archived runs are listed, too
}

export const SORTS: readonly (readonly [RunSort, string])[] = [
  ["created", "Created"],
  ["changed", "Last changed"],
  ["group", "Group"],
  ["model", "Base model"],
  ["rank", "Rank"],
  ["owner", "Owner"],
];
export const FROM_START: readonly RunSort[] = ["group", "model", "owner"]; // from a to z first

/** The order that an address names. */
export function runOrder(query: URLSearchParams): RunOrder {
  const sort = SORTS.find(([each]) => each === query.get("sort"))?.[0] ?? "created";
  const isSet = (name: string) => query.get(name) === "true";
  return { search: query.get("search") ?? "", sort, ascending: isSet("ascending"), archived: isSet("archived") };
}

/** The name that people or the client have given to the run, or the client to its session, or the ID's beginning. */
export function runName(run: Run): string {
  if (run.name) return run.name;
  const name = run.metadata?.name ?? run.metadata?.display_name;
  if (typeof name === "string" && name) return name;
  const number = run.id.split(":")[2] ?? "0"; // of the run in its session
  return run.display_name ? run.display_name + (number === "0" ? "" : ` · ${number}`) : shortId(run.id);
}

/** How a run is, in a sentence. */
export function healthText({ state, reason }: RunHealth): string {
  const word = state === "silent" || state === "left" ? `client ${state}` : state;
  return reason === null ? word : `${word}: ${reason}`;
}

/** Which request has failed last, and why. */
export function failureText({ last_failure }: RunHealth): string | null {
  if (!last_failure) return null;
  const { kind, category, error } = last_failure;
  const fault = category === "user" ? "the request was at fault" : "the server was at fault";
  return `${kind.replaceAll("_", " ")} failed, ${fault}: ${error}`;
}

/** How a run is, and why a request of it has failed, for a hint. */
export function healthHint(health: RunHealth): string {
  return [healthText(health), failureText(health)].filter(Boolean).join("\n");
}

/** The colour of a state. */
export function healthClass({ state }: RunHealth): "good" | "bad" | "dim" {
  if (state === "running") return "good";
  return state === "silent" || state === "errored" || state === "interrupted" ? "bad" : "dim";
}

/** The runs with the health that a later answer has told; and those of them that have ended since. */
export function withHealth(runs: Run[], { runs: open, is_cut }: OpenRunsResponse): { runs: Run[]; ended: string[] } {
  const hasEnded = (run: Run) => run.is_open && !is_cut && !Object.hasOwn(open, run.id);
  return {
    runs: runs.map((run) => ({ ...run, health: open[run.id] ?? run.health })),
    ended: runs.filter(hasEnded).map((run) => run.id),
  };
}

/** An ID that fits into a table: the beginning, and what tells the runs of a session apart. */
export function shortId(run: string): string {
  return run.replace(/^(.{8})[^:]+/, "$1…");
}

/** What is known of a list and a page of it. The first page may have new runs, others go on behind the last one. */
export function withPage(known: Run[], page: Run[], isFirst: boolean): Run[] {
  const fresh = new Map(page.map((run) => [run.id, run]));
  if (isFirst) return [...page, ...known.filter((run) => !fresh.has(run.id))];
  const old = known.map((run) => fresh.get(run.id) ?? run);
  const ids = new Set(known.map((run) => run.id));
  return [...old, ...page.filter((run) => !ids.has(run.id))];
}

/** The list with a newer answer about one of its runs. */
export function renewed(known: Run[], run: Run): Run[] {
  return known.map((each) => (each.id === run.id ? run : each));
}

/** The runs that have changed. */
export type Changed = ReadonlySet<string> | "all";

/** The runs of both. */
export function together(one: Changed, other: Changed): Changed {
  return one === "all" || other === "all" ? "all" : new Set([...one, ...other]);
}
