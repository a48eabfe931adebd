// What several pages are made of: choices, parts of a whole as one bar with a legend, a series as columns.
import type { ComponentChildren } from "preact";
import { useEffect, useRef, useState } from "preact/hooks";
import { stacked } from "./logic/bars";
import { duration } from "./logic/format";

/** Says that a page waits for the server, unless the answer is there in a moment. */
export function Loading() {
  return (
    <p class="loading" role="status">
      Loading …
    </p>
  );
}

/** Says at once, also to screen readers, what did not work; null: everything did. */
export function Problem({ text }: { text: string | null }) {
  if (!text) return null;
  return (
    <p class="problem" role="alert">
      {text}
    </p>
  );
}

/** A section that is scrolled sideways where it is too wide, also with the keyboard. */
export function Wide({ label, children }: { label: string; children: ComponentChildren }) {
  const element = useRef<HTMLElement>(null);
  useEffect(() => {
    const section = element.current!;
    const update = () =>
      section.scrollWidth > section.clientWidth
        ? section.setAttribute("tabindex", "0")
        : section.removeAttribute("tabindex");
    const size = new ResizeObserver(update);
    size.observe(section);
    if (section.lastElementChild) size.observe(section.lastElementChild);
    update();
    return () => size.disconnect();
  });
  return (
    <section ref={element} class="wide" aria-label={label}>
      {children}
    </section>
  );
}

/** Copies a text, where the browser allows it: on loopback, and on encrypted connections. */
export function Copy({ text }: { text: string }) {
  const [isDone, setDone] = useState(false);
  if (!navigator.clipboard) return null;
  const done = () => {
    setDone(true);
    setTimeout(setDone, 1500, false);
  };
  const copy = () => navigator.clipboard.writeText(text).then(done, () => undefined);
  return (
    <button type="button" class="copy" aria-label={`Copy ${text}`} onClick={copy}>
      {isDone ? "copied" : "copy"}
    </button>
  );
}

/** The head of a table. `numbers`: columns that are aligned to the right; a column without a name holds actions. */
export function Head({ names, numbers = [] }: { names: readonly string[]; numbers?: readonly string[] }) {
  return (
    <thead>
      <tr>
        {names.map((name) => (
          <th key={name} scope="col" class={numbers.includes(name) ? "number" : undefined}>
            {name || <span class="unseen">Actions</span>}
          </th>
        ))}
      </tr>
    </thead>
  );
}

interface ChoiceProps<Value> {
  legend: string;
  name: string;
  options: readonly (readonly [Value, string])[]; // with their labels
  value: Value;
  disabled?: boolean;
  choose: (value: Value) => void;
}

/** Lets one of several values be chosen, all of which are shown. */
export function Choice<Value extends string | number>({
  legend,
  name,
  options,
  value,
  disabled,
  choose,
}: ChoiceProps<Value>) {
  return (
    <fieldset class="choice">
      <legend class="hidden">{legend}</legend>
      {options.map(([option, label]) => (
        <label key={option}>
          <input
            type="radio"
            name={name}
            checked={value === option}
            disabled={disabled}
            onChange={() => choose(option)}
          />
          <span>{label}</span>
        </label>
      ))}
    </fieldset>
  );
}

export interface Part {
  name: string;
  size: number;
  note?: string;
}

/** Parts in the order and the colours of the palette; what they leave of `whole` stays empty. */
export function Parts({
  label,
  parts,
  whole,
  show,
}: {
  label: string;
  parts: Part[];
  whole: number;
  show: (size: number) => string;
}) {
  const bars = stacked(
    parts.map(({ size }) => size),
    whole,
    1000,
  );
  return (
    <div class="parts">
      <svg
        class="share-bar"
        viewBox="0 0 1000 10"
        preserveAspectRatio="none"
        role="img"
        aria-label={`${label}: ${parts.map(({ name, size }) => `${name} ${show(size)}`).join(", ")}`}
      >
        <rect class="p-rest" width="1000" height="10" />
        {parts.map(({ name }, i) => (
          <rect key={name} class={`p-${i % 8}`} {...bars[i]} height="10" />
        ))}
      </svg>
      <ul class="legend">
        {parts.map(({ name, size, note }, i) => (
          <li key={name} title={note}>
            <i class={`key p-${i % 8}`} />
            {name} <small>{show(size)}</small>
          </li>
        ))}
      </ul>
    </div>
  );
}

/** A series as columns of some seconds each, with its newest value. */
export function Columns({
  name,
  values,
  show,
  most,
  seconds = 5,
}: {
  name: string;
  values: number[];
  show: (value: number) => string;
  most?: number;
  seconds?: number;
}) {
  const age = (i: number) => (i + 1 < values.length ? `${duration((values.length - 1 - i) * seconds)} ago` : "now");
  const top = most ?? Math.max(...values, 1e-9);
  return (
    <figure class="chart">
      <figcaption>
        <span class="name">{name}</span>
        <span class="at">{show(values.at(-1) ?? 0)}</span>
      </figcaption>
      <svg
        class="series"
        viewBox={`0 0 ${values.length || 1} 100`}
        preserveAspectRatio="none"
        role="img"
        aria-label={`${name}: now ${show(values.at(-1) ?? 0)}, highest ${show(Math.max(...values, 0))}`}
      >
        {values.map((value, i) => (
          <g key={i}>
            <title>{`${show(value)}, ${age(i)}`}</title>
            <rect class="hover" x={i} width="1" height="100" />
            {value > 0 && (
              <rect class="p-0" x={i} y={100 - (100 * value) / top} width="0.8" height={(100 * value) / top} />
            )}
          </g>
        ))}
      </svg>
      <figcaption class="axis">
        <span>−{duration(values.length * seconds)}</span>
        <span>highest {show(Math.max(...values, 0))}</span>
        <span>now</span>
      </figcaption>
    </figure>
  );
}
