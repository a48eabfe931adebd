// Tells pages when runs have new points: by the server's stream, or every two seconds while there is none.

/** The runs that have changed, each with the first step that a client has added to. */
export type Changed = Map<string, number | null> | "all";

/** Calls `load` now and then every few seconds while the page can be seen, each time after the last has ended. */
export function poll(load: () => Promise<void>, seconds: number): () => void {
  let isOver = false;
  const run = async () => {
    while (!isOver) {
      if (!document.hidden) await load();
      await new Promise((wake) => setTimeout(wake, 1000 * seconds));
    }
  };
  void run();
  return () => (isOver = true);
}

/** Calls `changed` with the runs that have new points, while the page can be seen. Returns what ends it. */
export function watch(tell: (runs: Changed) => void): () => void {
  const stream = new EventSource("/console/api/stream");
  let isConnected = false;
  let missed: Changed = new Map(); // while the page cannot be seen
  const changed = (runs: Changed) => {
    if (document.hidden) missed = together(missed, runs);
    else tell(runs);
  };
  const seen = () => {
    if (document.hidden || (missed !== "all" && missed.size === 0)) return;
    const runs = missed;
    missed = new Map();
    tell(runs);
  };
  document.addEventListener("visibilitychange", seen);
  stream.addEventListener("open", () => {
    isConnected = true;
    changed("all"); // what came while the stream was away
  });
  stream.addEventListener("error", () => {
    if (isConnected) changed("all"); // and learn at once if the key is no longer valid
    isConnected = false;
  });
  stream.addEventListener("changed", (event) => {
    const { runs, steps }: { runs: string[]; steps: Record<string, number> } = JSON.parse((event as MessageEvent<string>).data);
    changed(new Map(runs.map((id) => [id, steps[id] ?? null])));
  });
  const timer = setInterval(() => {
    if (!isConnected && !document.hidden) changed("all");
  }, 2000);
  return () => {
    document.removeEventListener("visibilitychange", seen);
    stream.close();
    clearInterval(timer);
  };
}

/** The runs of both, each with the earlier step. */
function together(one: Changed, other: Changed): Changed {
  if (one === "all" || other === "all") return "all";
  const both = new Map(one);
  for (const [id, step] of other) {
    const steps = [both.get(id), step].filter((each) => each != null);
    both.set(id, steps.length > 0 ? Math.min(...steps) : null);
  }
  return both;
}
