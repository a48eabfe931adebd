// The head of all pages of one run: its name, and links to the pages.
import { useEffect, useState } from "preact/hooks";
import { getRun, type Run } from "./api";
import { duration } from "./format";
import { address, decoded, place, url } from "./router";

const PAGES = [["", "Curves"], ["/timing", "Timing"], ["/samples", "Samples"]] as const;

/** The name that the client has given to the run or to its session, or else the ID. */
export function runName(run: Run): string {
  const name = run.metadata?.name ?? run.metadata?.display_name;
  if (typeof name === "string" && name) return name;
  const number = run.id.split(":")[2] ?? "0"; // of the run in its session
  return run.display_name ? run.display_name + (number === "0" ? "" : ` · ${number}`) : run.id;
}

/** Whether the run's session is open, and its client there. */
export function state(run: Run): string {
  if (!run.is_open) return "ended";
  return run.silent_seconds == null ? "open" : `open, no heartbeat for ${duration(run.silent_seconds)}`;
}

/** An ID that fits into a table: the beginning, and what tells the runs of a session apart. */
export function shortId(run: string): string {
  return `${run.slice(0, 8)}…${run.slice(run.indexOf(":"))}`;
}

export function RunHeader({ id, run }: { id: string; run: Run | null }) {
  const base = url`/runs/${id}`;
  const open = decoded(place.value.path).slice("/runs/".length + id.length);
  return (
    <>
      <nav class="trail" aria-label="Path"><a href={address("/")}>Runs</a> <span aria-hidden="true">/</span></nav>
      <h1>{run ? runName(run) : id}</h1>
      <nav class="tabs" aria-label="Pages of the run">
        {PAGES.map(([path, name]) => (
          <a key={path} href={address(base + path)} aria-current={open === path || (path && open.startsWith(`${path}/`)) ? "page" : undefined}>{name}</a>
        ))}
      </nav>
    </>
  );
}

/** Loads a run once, for pages that need no more than its name. */
export function useRun(id: string): Run | null {
  const [run, setRun] = useState<Run | null>(null);
  useEffect(() => void getRun(id).then(setRun, () => setRun(null)), [id]);
  return run;
}
