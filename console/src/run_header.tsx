// The head of all pages of one run: its name, and links to the pages.
import { useEffect, useState } from "preact/hooks";
import { getRun } from "./api";
import type { Run } from "./api_types";
import { decoded, url } from "./logic/addresses";
import { runName } from "./logic/runs";
import { address, place } from "./router";

const PAGES = [
  ["", "Curves"],
  ["/timing", "Timing"],
  ["/samples", "Samples"],
  ["/checkpoints", "Checkpoints"],
] as const;

export function RunHeader({ id, run }: { id: string; run: Run | null }) {
  const base = url`/runs/${id}`;
  const open = decoded(place.value.path).slice("/runs/".length + id.length);
  return (
    <>
      <nav class="trail" aria-label="Path">
        <a href={address("/")}>Runs</a> <span aria-hidden="true">/</span>
      </nav>
      <h1>{run ? runName(run) : id}</h1>
      <nav class="tabs" aria-label="Pages of the run">
        {PAGES.map(([path, name]) => (
          <a
            key={path}
            href={address(base + path)}
            aria-current={open === path || (path && open.startsWith(`${path}/`)) ? "page" : undefined}
          >
            {name}
          </a>
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
