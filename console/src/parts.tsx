// Parts of a whole as one bar with a legend, and a series as columns.
import { duration } from "./format";

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
        {values.map((value, i) => value > 0 && <rect key={i} class="p-0" x={i} y={100 - (100 * value) / top} width="0.8" height={(100 * value) / top} />)}
      </svg>
      <figcaption class="axis"><span>−{duration(values.length * seconds)}</span><span>at most {show(Math.max(...values, 0))}</span><span>now</span></figcaption>
    </figure>
  );
}
