// The address: which page is open, and what it shows. Links are ordinary links that the page follows itself.
import { signal } from "@preact/signals";

const ROOT = "/console";

export const place = signal(read());

function read(): { path: string; query: URLSearchParams } {
  return { path: location.pathname.slice(ROOT.length) || "/", query: new URLSearchParams(location.search) };
}

export function address(path: string): string {
  return ROOT + path;
}

/** Puts choices of the open page into its address, so that it can be shared. Empty text removes one. */
export function remember(choices: Record<string, string>): void {
  const query = new URLSearchParams(location.search);
  for (const [name, value] of Object.entries(choices)) value ? query.set(name, value) : query.delete(name);
  const text = query.toString();
  history.replaceState(null, "", location.pathname + (text && `?${text}`));
}

/** Opens another page. */
export function go(target: string): void {
  history.pushState(null, "", target);
  place.value = read();
  scrollTo(0, 0);
  document.querySelector<HTMLElement>("main")?.focus();
}

addEventListener("popstate", () => (place.value = read()));
addEventListener("click", (event) => {
  const link = (event.target as Element).closest?.("a");
  if (!link || event.button || event.metaKey || event.ctrlKey || event.shiftKey || event.defaultPrevented) return;
  if (link.origin !== location.origin || !link.pathname.startsWith(ROOT) || link.hash || link.download) return;
  event.preventDefault();
  go(link.href);
});
