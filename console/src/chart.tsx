// One metric of several runs as curves, with the values under the pointer.
import { useEffect, useMemo, useRef, useState } from "preact/hooks";
import uPlot from "uplot";
import type { CurvesResponse, RunCurve } from "./api_types";
import { decimals, duration, mark, number } from "./logic/format";
import {
  isRounding,
  metricTitle,
  NOISE,
  smooth,
  valueAt,
  weightOf,
  type Axis,
  type Value,
  type Zoom,
} from "./logic/series";
import { theme } from "./theme";

const HEIGHT = 150; // CSS pixels
const LEAST_ZOOM = 6; // CSS pixels that are drawn over

export interface ChartedRun {
  id: string;
  label: string;
  color: string;
}

interface Props {
  name: string;
  runs: ChartedRun[];
  answers: ReadonlyMap<string, CurvesResponse>;
  axis: Axis;
  smoothing: number | null; // weight of the past, 0 to 1; null: that of noisy curves
  zoom: Zoom | null;
  setZoom: (zoom: Zoom | null) => void;
  open: ((metric: string, x: number) => void) | null; // is told of a click on a point
}

/** A curve with what is drawn of it. */
interface Drawn extends ChartedRun {
  curve: RunCurve;
  line: Value[];
  behind: Value[][]; // the raw values, or the least and the greatest ones
}

export function Chart({ name, runs, answers, axis, smoothing, zoom, setZoom, open }: Props) {
  const container = useRef<HTMLDivElement>(null);
  const plot = useRef<uPlot | null>(null);
  const clicked = useRef<() => void>(() => undefined); // on the point under the pointer
  const [index, setIndex] = useState<number | null>(null);
  const curves = runs.flatMap((run) => {
    const curve = answers.get(run.id)?.curves.find((each) => each.name === name);
    return curve ? [{ ...run, curve }] : [];
  });
  const drawn = useMemo(
    () => curves.map((each): Drawn => ({ ...each, ...lines(each.curve, smoothing) })),
    [runs.map((run) => `${run.id} ${run.color} ${run.label}`).join(), answers, smoothing, name],
  );
  const data = useMemo(() => aligned(drawn), [drawn]);
  const raw = useMemo(() => {
    const curves = drawn.map((each) => ({ ...each, line: each.curve.y, behind: [] }));
    return aligned(curves).slice(1) as (Value | undefined)[][];
  }, [drawn]);
  const layout = JSON.stringify([
    drawn.map((each) => [each.id, each.color, each.behind.length]),
    [axis, theme.value, zoom],
  ]);

  useEffect(() => {
    const parent = container.current!;
    const created = new uPlot(options(name, drawn, axis, parent.clientWidth, setIndex, zoom, setZoom), data, parent);
    plot.current = created;
    let pressed = 0; // CSS pixels from the left
    created.over.addEventListener("mousedown", (event) => (pressed = event.clientX));
    created.over.addEventListener("click", (event) => {
      if (Math.abs(event.clientX - pressed) < LEAST_ZOOM) clicked.current();
    });
    const size = new ResizeObserver(() => created.setSize({ width: parent.clientWidth, height: HEIGHT }));
    size.observe(parent);
    return () => {
      size.disconnect();
      created.destroy();
    };
  }, [layout]);
  useEffect(() => plot.current?.setData(data), [data]);

  const title = metricTitle(name);
  const shown = (value: Value) => (isRounding(name, value) ? "0" : number(value));
  const values = drawn.map((run, i) => ({ run, value: valueAt(raw[i]!, index ?? raw[i]!.length - 1) }));
  const spoken = values.map(({ run, value }) => `${run.label} ${shown(value)}`).join(", ");
  const x = index === null ? null : data[0][index];
  clicked.current = () => x != null && open?.(name, x);
  return (
    <figure class="chart">
      <figcaption>
        <span class="name">
          {title ?? name}
          {title && <small>{name}</small>}
        </span>
        <span class="at">{x == null ? "" : axis === "step" ? `step ${x}` : duration(x)}</span>
      </figcaption>
      <ul class="values">
        {values.map(({ run, value }) => (
          <li key={run.id} title={run.label}>
            <Swatch color={run.color} />
            {shown(value)}
          </li>
        ))}
      </ul>
      <div
        ref={container}
        class={open ? "opens" : undefined}
        role="img"
        aria-label={`Curves of ${title ?? name}: ${spoken}`}
      />
    </figure>
  );
}

export function Swatch({ color }: { color: string | null }) {
  return (
    <svg class="swatch" viewBox="0 0 8 8" aria-hidden="true">
      <circle
        cx="4"
        cy="4"
        r="3.5"
        fill={color ?? "none"}
        stroke={color ?? "currentColor"}
        stroke-opacity={color ? 1 : 0.3}
      />
    </svg>
  );
}

function lines(curve: RunCurve, smoothing: number | null): Pick<Drawn, "line" | "behind"> {
  const weight = weightOf(curve.y, smoothing);
  const line = smooth(curve.y, weight);
  if (curve.low && curve.high) return { line, behind: [curve.low, curve.high] };
  return { line, behind: weight > 0 ? [curve.y] : [] };
}

/** The raw values of all runs, then their lines. */
function aligned(drawn: Drawn[]): uPlot.AlignedData {
  if (!drawn.length) return [[]];
  return uPlot.join([
    ...drawn.flatMap(({ curve, behind }) => behind.map((values) => [curve.x, values] as uPlot.AlignedData)),
    ...drawn.map(({ curve, line }) => [curve.x, line] as uPlot.AlignedData),
  ]);
}

/** As uPlot does by itself, but to 1 instead of 100 where all values are 0, and around 0 where they are rounding. */
function heights(name: string): uPlot.Range.Function {
  return (_, least, most) => {
    if (least === null || most === null) return [null, null];
    if (least === 0 && most === 0) return [0, 1];
    if (isRounding(name, least) && isRounding(name, most)) return [-NOISE, NOISE];
    return uPlot.rangeNum(least, most, 0.1, true);
  };
}

/** Whether a curve has one value, of which no line can be drawn. */
function isAlone(line: Value[]): boolean {
  return line.filter((value) => value !== null).length === 1;
}

function options(
  name: string,
  drawn: Drawn[],
  axis: Axis,
  width: number,
  onPoint: (index: number | null) => void,
  zoom: Zoom | null,
  setZoom: (zoom: Zoom) => void,
): uPlot.Options {
  const style = getComputedStyle(document.documentElement);
  const ink = style.getPropertyValue("--muted");
  const grid = { stroke: style.getPropertyValue("--line"), width: 1 };
  const font = "11px system-ui, sans-serif";
  const line = (run: Drawn): uPlot.Series => ({
    stroke: run.color,
    width: 1.5,
    spanGaps: true,
    points: { show: isAlone(run.line), size: 6, fill: run.color },
  });
  const faint = (run: Drawn): uPlot.Series => ({ ...line(run), width: 1, alpha: 0.25 });
  const bands = drawn.flatMap(({ behind, color }, i): uPlot.Band[] => {
    const at = 1 + drawn.slice(0, i).reduce((sum, each) => sum + each.behind.length, 0);
    return behind.length === 2 ? [{ series: [at + 1, at], fill: `${color}33` }] : [];
  });
  const select = (plot: uPlot) => {
    const { left, width: size } = plot.select;
    if (size < LEAST_ZOOM) return;
    plot.setSelect({ left: 0, top: 0, width: 0, height: 0 }, false);
    setZoom([plot.posToVal(left, "x"), plot.posToVal(left + size, "x")]);
  };
  const ticks = (
    axis === "time"
      ? (_: uPlot, values: number[]) => values.map(duration)
      : (_: uPlot, values: number[]) => values.map((value) => (Number.isInteger(value) ? number(value) : ""))
  ) as uPlot.Axis.Values;
  return {
    width,
    height: HEIGHT,
    padding: [6, 14, 0, 0],
    legend: { show: false },
    cursor: { sync: { key: "charts" }, points: { size: 5 }, y: false, drag: { setScale: false } },
    scales: { x: { time: false, ...(zoom ? { range: zoom } : {}) }, y: { range: heights(name) } },
    bands,
    axes: [
      { stroke: ink, grid, ticks: { show: false }, font, size: 24, gap: 6, values: ticks },
      {
        stroke: ink,
        grid,
        ticks: { show: false },
        font,
        size: 54,
        gap: 4,
        values: (_, values) => values.map((value) => mark(value, decimals(values))),
      },
    ],
    series: [{}, ...drawn.flatMap((run) => run.behind.map(() => faint(run))), ...drawn.map(line)],
    hooks: { setCursor: [(plot) => onPoint(plot.cursor.idx ?? null)], setSelect: [select] },
  };
}
