// One metric of several runs as curves, with the values under the pointer.
import { useEffect, useRef, useState } from "preact/hooks";
import uPlot from "uplot";
import { decimals, duration, mark, number } from "./logic/format";
import { curve, smooth, valueAt, type Axis, type ChartPoint } from "./logic/series";
import { theme } from "./theme";

const HEIGHT = 150; // CSS pixels

export interface ChartedRun {
  id: string;
  label: string;
  color: string;
  points: ChartPoint[];
}

interface Props {
  name: string;
  runs: ChartedRun[];
  axis: Axis;
  smoothing: number; // weight of the past, 0 to 1
}

export function Chart({ name, runs, axis, smoothing }: Props) {
  const container = useRef<HTMLDivElement>(null);
  const plot = useRef<uPlot | null>(null);
  const [index, setIndex] = useState<number | null>(null);
  const measured = runs.filter((run) => run.points.some((point) => Object.hasOwn(point.metrics, name)));
  const layout = JSON.stringify([measured.map((run) => [run.id, run.color]), axis, smoothing > 0, theme.value]);
  const data = aligned(measured, name, axis, smoothing);

  useEffect(() => {
    const parent = container.current!;
    const created = new uPlot(options(measured, axis, smoothing > 0, parent.clientWidth, setIndex), data, parent);
    plot.current = created;
    const size = new ResizeObserver(() => created.setSize({ width: parent.clientWidth, height: HEIGHT }));
    size.observe(parent);
    return () => {
      size.disconnect();
      created.destroy();
    };
  }, [layout]);
  useEffect(() => plot.current?.setData(data), [runs, axis, smoothing]);

  const smoothed = data.slice(1 + (smoothing > 0 ? measured.length : 0)) as (number | null | undefined)[][];
  const values = measured.map((run, i) => ({ run, value: valueAt(smoothed[i]!, index ?? smoothed[i]!.length - 1) }));
  const x = index === null ? null : data[0][index];
  return (
    <figure class="chart">
      <figcaption>
        <span class="name">{name}</span>
        <span class="at">{x == null ? "" : axis === "step" ? `step ${x}` : duration(x)}</span>
      </figcaption>
      <ul class="values">
        {values.map(({ run, value }) => (
          <li key={run.id} title={run.label}>
            <Swatch color={run.color} />
            {number(value)}
          </li>
        ))}
      </ul>
      <div
        ref={container}
        role="img"
        aria-label={`Curves of ${name}: ${values.map(({ run, value }) => `${run.label} ${number(value)}`).join(", ")}`}
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

function aligned(runs: ChartedRun[], name: string, axis: Axis, smoothing: number): uPlot.AlignedData {
  const curves = runs.map((run) => curve(run.points, name, axis));
  if (!curves.length) return [[]];
  const raw = curves.map(({ x, y }) => [x, y] as uPlot.AlignedData);
  const smoothed = curves.map(({ x, y }) => [x, smooth(y, smoothing)] as uPlot.AlignedData);
  return uPlot.join(smoothing > 0 ? [...raw, ...smoothed] : raw);
}

/** As uPlot does by itself, but to 1 instead of 100 where all values are 0. */
function heights(_: uPlot, least: number | null, most: number | null): uPlot.Range.MinMax {
  if (least === null || most === null) return [null, null];
  return least === 0 && most === 0 ? [0, 1] : uPlot.rangeNum(least, most, 0.1, true);
}

function options(
  runs: ChartedRun[],
  axis: Axis,
  isSmoothed: boolean,
  width: number,
  onPoint: (index: number | null) => void,
): uPlot.Options {
  const style = getComputedStyle(document.documentElement);
  const ink = style.getPropertyValue("--muted");
  const grid = { stroke: style.getPropertyValue("--line"), width: 1 };
  const font = "11px system-ui, sans-serif";
  const line = (run: ChartedRun): uPlot.Series => ({
    stroke: run.color,
    width: 1.5,
    spanGaps: true,
    points: { show: false },
  });
  const faint = (run: ChartedRun): uPlot.Series => ({ ...line(run), width: 1, alpha: 0.25 });
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
    cursor: { sync: { key: "charts" }, points: { size: 5 }, y: false },
    scales: { x: { time: false }, y: { range: heights } },
    axes: [
      { stroke: ink, grid, ticks: { show: false }, font, size: 24, gap: 2, values: ticks },
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
    series: [{}, ...(isSmoothed ? runs.map(faint) : []), ...runs.map(line)],
    hooks: { setCursor: [(plot) => onPoint(plot.cursor.idx ?? null)] },
  };
}
