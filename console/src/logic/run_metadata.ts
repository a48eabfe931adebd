// What clients say of their runs, as the columns of a table.
import type { Run } from "../api_types";

const MOST_COLUMNS = 8;
const MOST_CHARACTERS = 60; // of a value in a table
const NAMES = ["name", "display_name"]; // which have a column of their own

/** The values of a run by their paths, such as `optimizer.learning_rate`. Lists are values. */
function leaves(value: unknown, path = ""): [string, unknown][] {
  if (value === null || typeof value !== "object" || Array.isArray(value)) return path ? [[path, value]] : [];
  return Object.entries(value).flatMap(([key, part]) => leaves(part, path ? `${path}.${key}` : key));
}

/** The paths that become columns: those that most runs have, in the order of their first appearance. */
export function metadataColumns(runs: Run[]): string[] {
  const counts = new Map<string, number>();
  for (const run of runs)
    for (const [path] of leaves(run.metadata ?? {}))
      if (!NAMES.includes(path)) counts.set(path, (counts.get(path) ?? 0) + 1);
  const most = [...counts.entries()].sort((a, b) => b[1] - a[1]).slice(0, MOST_COLUMNS);
  const chosen = new Set(most.map(([path]) => path));
  return [...counts.keys()].filter((path) => chosen.has(path));
}

/** What a run has in a column; nothing where its client has not said it. */
export function metadataText(run: Run, path: string): string {
  const found = leaves(run.metadata ?? {}).find(([each]) => each === path);
  if (found === undefined) return "";
  const text = typeof found[1] === "string" ? found[1] : JSON.stringify(found[1]);
  return text.length > MOST_CHARACTERS ? `${text.slice(0, MOST_CHARACTERS)}…` : text;
}
