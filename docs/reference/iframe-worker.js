// Lets the site's search work on pages that are opened as files. Browsers start no workers there, so the script of
// the worker runs in a hidden frame. The theme looks for this name (https://github.com/squidfunk/iframe-worker).
class IFrameWorker extends EventTarget {
  constructor(url) {
    super();
    const frame = document.createElement("iframe");
    frame.hidden = true;
    frame.srcdoc = "<body></body>";
    this.inside = new Promise((resolve, reject) => {
      frame.onload = () => {
        const inside = frame.contentWindow;
        inside.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
        const script = inside.document.createElement("script");
        script.onload = () => resolve(inside);
        script.onerror = () => reject(new Error(`cannot load ${url}`));
        script.src = url;
        inside.document.body.append(script);
      };
    });
    document.body.append(frame);
  }

  postMessage(data) {
    this.inside.then((inside) => inside.dispatchEvent(new MessageEvent("message", { data })));
  }
}

window.IFrameWorker = IFrameWorker;
if (location.protocol === "file:") window.Worker = IFrameWorker;
