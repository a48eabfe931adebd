// Tells pages when runs have new points: by the server's stream, or every two seconds while there is none.
import { Refused } from "./api";
import { together, type Changed } from "./logic/runs";
import { listen } from "./stream";

const FORBIDDEN = 403;

/** Calls `load` now and then every few seconds while the page can be seen, each time after the last has ended.
 *
 * `failed` is told what has failed. Where the key has no right to the answer, it is not asked for again.
 */
export function poll(
  load: () => Promise<void>,
  seconds: number,
  failed: (error: Error) => void = () => undefined,
): () => void {
  let isOver = false;
  const run = async () => {
    while (!isOver) {
      if (!document.hidden)
        await load().catch((error: Error) => {
          if (error instanceof Refused && error.status === FORBIDDEN) isOver = true;
          failed(error);
        });
      await new Promise((wake) => setTimeout(wake, 1000 * seconds));
    }
  };
  void run();
  return () => (isOver = true);
}

/** Calls `tell` with the runs that have new points, while the page can be seen. Returns what ends it. */
export function watch(tell: (runs: Changed) => void): () => void {
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
  const end = listen((news) => {
    if (news.kind === "changed") return changed(new Set(news.runs));
    // What came while the stream was away; and where it is lost, whether the key is valid no longer.
    if (news.kind === "opened" || isConnected) changed("all");
    isConnected = news.kind === "opened";
  });
  const timer = setInterval(() => {
    if (!isConnected && !document.hidden) changed("all");
  }, 2000);
  return () => {
    document.removeEventListener("visibilitychange", seen);
    end();
    clearInterval(timer);
  };
}
