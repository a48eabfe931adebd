// The server's stream of news, for whatever holds it: a page, or the worker that pages share.

export type StreamNews = { kind: "opened" } | { kind: "lost" } | { kind: "changed"; runs: string[] };
export type Hear = (news: StreamNews) => void;

/** Opens the stream, which connects again by itself where it can. */
export function openStream(hear: Hear): EventSource {
  const stream = new EventSource("/console/api/stream");
  stream.addEventListener("open", () => hear({ kind: "opened" }));
  stream.addEventListener("error", () => hear({ kind: "lost" }));
  stream.addEventListener("changed", (event) =>
    hear({ kind: "changed", runs: JSON.parse((event as MessageEvent<string>).data).runs }),
  );
  return stream;
}
