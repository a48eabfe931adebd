// Runs as a list shows them: their names and states, and which answer counts.
import type { OpenRunsResponse, Run, RunHealth } from "../api_types";

/** The name that the client has given to the run or to its session, or else the ID. */
export function runName(run: Run): string {
  const name = run.metadata?.name ?? run.metadata?.display_name;
  if (typeof name === "string" && name) return name;
  const number = run.id.split(":")[2] ?? "0"; // of the run in its session
  return run.display_name ? run.display_name + (number === "0" ? "" : ` · ${number}`) : run.id;
}

/** How a run is, in a sentence. */
export function healthText({ state, reason }: RunHealth): string {
  const word = state === "silent" ? "client silent" : state;
  return reason === null ? word : `${word}: ${reason}`;
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
  return `${run.slice(0, 8)}…${run.slice(run.indexOf(":"))}`;
}

/** What a filter looks at. */
export function runText(run: Run): string {
  return [run.id, run.base_model, run.owner, JSON.stringify(run.metadata ?? "")].join(" ");
}

/** Newest first, each once, as the newest answer tells it. */
export function merged(known: Run[], fresh: Run[]): Run[] {
  const byId = new Map([...known, ...fresh].map((run) => [run.id, run]));
  return [...byId.values()].sort((a, b) => b.created_at - a.created_at);
}

/** The runs that have changed. */
export type Changed = ReadonlySet<string> | "all";

/** The runs of both. */
export function together(one: Changed, other: Changed): Changed {
  return one === "all" || other === "all" ? "all" : new Set([...one, ...other]);
}
