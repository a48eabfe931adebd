// Runs of a table put into groups: by the group that people have put them into, or by what their clients have said.
import type { Run } from "../api_types";
import { metadataColumns, metadataText } from "./run_metadata";

export const BY_GROUP = "group"; // what people have put them into
const METADATA = "metadata.";

export interface RunGroup {
  name: string; // empty: those that have none
  runs: Run[];
}

/** What a table can be grouped by, with words. An empty name: nothing. */
export function groupings(runs: Run[]): [string, string][] {
  return [
    ["", "nothing"],
    [BY_GROUP, "group"],
    ...metadataColumns(runs).map((path): [string, string] => [METADATA + path, path]),
  ];
}

/** The groups in the order of their first runs; those without a group come last. */
export function runGroups(runs: Run[], by: string): RunGroup[] {
  const groups = new Map<string, Run[]>();
  const name = (run: Run) => (by === BY_GROUP ? (run.group ?? "") : metadataText(run, by.slice(METADATA.length)));
  for (const run of runs) groups.set(name(run), [...(groups.get(name(run)) ?? []), run]);
  const found = [...groups].map(([name, runs]) => ({ name, runs }));
  return [...found.filter((group) => group.name), ...found.filter((group) => !group.name)];
}
