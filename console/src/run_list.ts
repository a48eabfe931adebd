// The runs of a list, page by page as the server searches and sorts them, and kept up to date.
import { useEffect, useRef, useState } from "preact/hooks";
import { getOpenRuns, getRun, listRuns } from "./api";
import type { Run } from "./api_types";
import { poll, watch } from "./live";
import { renewed, withHealth, withPage } from "./logic/runs";
import type { RunOrder } from "./logic/runs";

const MOST_SINGLY = 5; // runs that are loaded one by one when they change
const HEALTH_SECONDS = 3;

export interface RunList {
  runs: Run[] | null; // null: not known yet
  more: (() => void) | null; // null: there are no more
  error: string | null;
  renew: (run: Run) => void; // with a newer answer about it
}

export function useRuns(order: RunOrder): RunList {
  const [runs, setRuns] = useState<Run[] | null>(null);
  const [next, setNext] = useState<number | null>(null);
  const [error, setError] = useState<string | null>(null);
  const asked = JSON.stringify(order);
  const newest = useRef(asked);
  const shown = useRef<{ asked: string; ids: Set<string> }>({ asked: "", ids: new Set() });
  newest.current = asked;

  const load = async (cursor: number | null) => {
    try {
      const page = await listRuns(order, cursor ?? 0);
      if (newest.current !== asked) return; // another search has begun
      const isNew = shown.current.asked !== asked;
      if (isNew) shown.current = { asked, ids: new Set() };
      for (const run of page.runs) shown.current.ids.add(run.id);
      setRuns((known) => (isNew ? page.runs : withPage(known ?? [], page.runs, cursor === null)));
      setNext((old) => (cursor === null && !isNew && old !== null ? old : page.next_cursor));
      setError(null);
    } catch (refused) {
      if (newest.current === asked) setError((refused as Error).message);
    }
  };
  const renew = (run: Run) => setRuns((known) => known && renewed(known, run));
  const loadOne = (id: string) => getRun(id).then(renew, () => undefined);
  const look = () =>
    getOpenRuns().then((answer) =>
      setRuns((known) => {
        const news = withHealth(known ?? [], answer);
        news.ended.slice(0, MOST_SINGLY).forEach(loadOne);
        return known && news.runs;
      }),
    );
  useEffect(() => poll(look, HEALTH_SECONDS), []);
  useEffect(() => {
    void load(null);
    return watch((changed) => {
      const isFew = changed !== "all" && changed.size <= MOST_SINGLY;
      if (isFew && [...changed].every((id) => shown.current.ids.has(id))) changed.forEach(loadOne);
      else void load(null);
    });
  }, [asked]);
  const listed = runs && (order.archived ? runs : runs.filter((run) => run.archived_at === null));
  return { runs: listed, renew, more: next === null ? null : () => void load(next), error };
}
