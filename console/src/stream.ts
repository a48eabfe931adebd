// The server's stream of news, as one page hears it: by the worker that all pages share, or else by one of its own.
import { signIns } from "./api";
import { openStream, type Hear, type StreamNews } from "./event_stream";
import { url } from "./logic/addresses";

/** What a page tells the worker. */
export type FromPage = "join" | "join anew" | "leave";

let signInsSeen = 0; // of this page, when it last joined

/** Calls `hear` with the news until what is returned is called. */
export function listen(hear: Hear): () => void {
  if (typeof SharedWorker === "undefined") return listenAlone(hear);
  let end = join(hear, () => {
    end = listenAlone(hear); // the worker cannot be loaded
  });
  return () => end();
}

function join(hear: Hear, fail: () => void): () => void {
  const source = document.querySelector<HTMLMetaElement>('meta[name="source"]')?.content ?? "";
  const worker = new SharedWorker(url`/console/assets/stream_worker.js?v=${source}`, { type: "module" });
  const say = (word: FromPage) => worker.port.postMessage(word);
  const leave = () => say("leave");
  const comeBack = ({ persisted }: PageTransitionEvent) => persisted && say("join");
  const end = () => {
    removeEventListener("pagehide", leave);
    removeEventListener("pageshow", comeBack);
    leave();
    worker.port.close();
  };
  worker.port.onmessage = ({ data }: MessageEvent<StreamNews>) => hear(data);
  worker.onerror = () => {
    end();
    fail();
  };
  addEventListener("pagehide", leave);
  addEventListener("pageshow", comeBack);
  say(signIns.value === signInsSeen ? "join" : "join anew");
  signInsSeen = signIns.value;
  return end;
}

/** Opens a stream of the page's own, which is closed as long as the page cannot be seen. */
function listenAlone(hear: Hear): () => void {
  let stream: EventSource | null = null;
  const follow = () => {
    if (document.hidden) {
      stream?.close();
      stream = null;
      hear({ kind: "lost" });
      return;
    }
    stream ??= openStream(hear);
  };
  document.addEventListener("visibilitychange", follow);
  follow();
  return () => {
    document.removeEventListener("visibilitychange", follow);
    stream?.close();
  };
}
