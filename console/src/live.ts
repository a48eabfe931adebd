// Tells pages when runs have new points: by the server's stream, or every two seconds while there is none.
import { together, type Changed } from "./logic/runs";

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
  let missed: Changed = new Set(); // while the page cannot be seen
  const changed = (runs: Changed) => {
    if (document.hidden) missed = together(missed, runs);
    else tell(runs);
  };
  const seen = () => {
    if (document.hidden || (missed !== "all" && missed.size === 0)) return;
    const runs = missed;
    missed = new Set();
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
    const { runs }: { runs: string[] } = JSON.parse((event as MessageEvent<string>).data);
    changed(new Set(runs));
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
