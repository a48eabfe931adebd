// Parts of a whole as one bar with a legend, and a series as columns.
import type { ComponentChildren } from "preact";
import { useEffect, useRef, useState } from "preact/hooks";
import { duration } from "./format";

/** Says that a page waits for the server, unless the answer is there in a moment. */
export function Loading() {
  return <p class="loading" role="status">Loading …</p>;
}

/** A section that is scrolled sideways where it is too wide, also with the keyboard. */
export function Wide({ label, children }: { label: string; children: ComponentChildren }) {
  const place = useRef<HTMLElement>(null);
  useEffect(() => {
    const section = place.current!;
    const look = () => (section.scrollWidth > section.clientWidth ? section.setAttribute("tabindex", "0") : section.removeAttribute("tabindex"));
    const size = new ResizeObserver(look);
    size.observe(section);
    if (section.lastElementChild) size.observe(section.lastElementChild);
    look();
    return () => size.disconnect();
  });
  return <section ref={place} class="wide" aria-label={label}>{children}</section>;
}

/** Copies a text, where the browser allows it: on loopback, and on encrypted connections. */
export function Copy({ text }: { text: string }) {
  const [isDone, setDone] = useState(false);
  if (!navigator.clipboard) return null;
  const copy = () => navigator.clipboard.writeText(text).then(() => (setDone(true), setTimeout(setDone, 1500, false)), () => undefined);
  return <button type="button" class="copy" aria-label={`Copy ${text}`} onClick={copy}>{isDone ? "copied" : "copy"}</button>;
}

export interface Part {
  name: string;
  size: number;
  note?: string;
}

/** Parts in the order and the colours of the palette; what they leave of `whole` stays empty. */
export function Parts({ label, parts, whole, show }: { label: string; parts: Part[]; whole: number; show: (size: number) => string }) {
  let x = 0;
  return (
    <div class="parts">
      <svg class="share-bar" viewBox="0 0 1000 10" preserveAspectRatio="none" role="img" aria-label={`${label}: ${parts.map(({ name, size }) => `${name} ${show(size)}`).join(", ")}`}>
        <rect class="p-rest" width="1000" height="10" />
        {parts.map(({ name, size }, i) => {
          const width = whole ? (1000 * size) / whole : 0;
          const rect = <rect key={name} class={`p-${i % 8}`} x={x} width={width} height="10" />;
          x += width;
          return rect;
        })}
      </svg>
      <ul class="legend">
        {parts.map(({ name, size, note }, i) => (
          <li key={name} title={note}><i class={`key p-${i % 8}`} />{name} <small>{show(size)}</small></li>
        ))}
      </ul>
    </div>
  );
}

/** A series as columns of some seconds each, with its newest value. */
export function Columns({ name, values, show, most, seconds = 5 }: { name: string; values: number[]; show: (value: number) => string; most?: number; seconds?: number }) {
  const top = most ?? Math.max(...values, 1e-9);
  return (
    <figure class="chart">
      <figcaption><span class="name">{name}</span><span class="at">{show(values.at(-1) ?? 0)}</span></figcaption>
      <svg class="series" viewBox={`0 0 ${values.length || 1} 100`} preserveAspectRatio="none" role="img" aria-label={`${name}: now ${show(values.at(-1) ?? 0)}, at most ${show(Math.max(...values, 0))}`}>
        {values.map((value, i) => (
          <g key={i}>
            <title>{`${show(value)}, ${i + 1 < values.length ? `${duration((values.length - 1 - i) * seconds)} ago` : "now"}`}</title>
            <rect class="hover" x={i} width="1" height="100" />
            {value > 0 && <rect class="p-0" x={i} y={100 - (100 * value) / top} width="0.8" height={(100 * value) / top} />}
          </g>
        ))}
      </svg>
      <figcaption class="axis"><span>−{duration(values.length * seconds)}</span><span>at most {show(Math.max(...values, 0))}</span><span>now</span></figcaption>
    </figure>
  );
}
