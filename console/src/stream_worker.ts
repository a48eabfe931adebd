// Holds the server's stream of news for all pages of a browser: browsers open six connections to a server at most.
// It runs as a shared worker, which ends with the last page.
import { openStream, type StreamNews } from "./event_stream";
import type { FromPage } from "./stream";

interface SharedScope {
  onconnect: ((event: MessageEvent) => void) | null;
}

const pages = new Set<MessagePort>();
let stream: EventSource | null = null;

function tell(news: StreamNews): void {
  for (const page of pages) page.postMessage(news);
}

function close(): void {
  stream?.close();
  stream = null;
}

function hear(page: MessagePort, word: FromPage): void {
  if (word === "leave") {
    pages.delete(page);
    if (pages.size === 0) close();
    return;
  }
  pages.add(page);
  if (word === "join anew") close(); // somebody else has signed in
  if (stream === null || stream.readyState === EventSource.CLOSED) stream = openStream(tell);
  else if (stream.readyState === EventSource.OPEN) page.postMessage({ kind: "opened" } satisfies StreamNews);
}

(globalThis as unknown as SharedScope).onconnect = (event) => {
  const page = event.ports[0]!;
  page.onmessage = ({ data }: MessageEvent<FromPage>) => hear(page, data);
};
