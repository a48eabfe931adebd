// Tells pages when runs have new points: by the server's stream, or every two seconds while there is none.

export type Changed = Set<string> | "all";

/** Calls `changed` with the runs that have new points. Returns what ends it. */
export function watch(changed: (runs: Changed) => void): () => void {
  const stream = new EventSource("/console/api/stream");
  let isConnected = false;
  stream.addEventListener("open", () => {
    isConnected = true;
    changed("all"); // what came while the stream was away
  });
  stream.addEventListener("error", () => (isConnected = false));
  stream.addEventListener("changed", (event) => {
    const { runs }: { runs: string[] } = JSON.parse((event as MessageEvent<string>).data);
    changed(new Set(runs));
  });
  const timer = setInterval(() => {
    if (!isConnected && !document.hidden) changed("all");
  }, 2000);
  return () => {
    stream.close();
    clearInterval(timer);
  };
}
