// The charts of one or several runs, with the choices that hold for all of them.
import { useState } from "preact/hooks";
import { Chart, type ChartedRun } from "./chart";
import { Choice } from "./parts";
import { place, remember } from "./router";
import { csv, metricNames, smoothingWeight, type Axis } from "./logic/series";

const AXES = [
  ["step", "step"],
  ["time", "time"],
] as const;

export function Curves({ runs, empty }: { runs: ChartedRun[]; empty: string }) {
  const query = place.value.query;
  const [axis, setAxis] = useState<Axis>(query.get("x") === "time" ? "time" : "step");
  const [smoothing, setSmoothing] = useState(smoothingWeight(query.get("smoothing")));
  const [filter, setFilter] = useState("");
  const names = metricNames(runs.map((run) => run.points));
  const shown = names.filter((name) => name.toLowerCase().includes(filter.toLowerCase()));
  const chooseAxis = (value: Axis) => {
    setAxis(value);
    remember({ x: value === "time" ? value : "" });
  };
  const chooseSmoothing = (text: string) => {
    setSmoothing(smoothingWeight(text));
    remember({ smoothing: smoothingWeight(text) ? text : "" });
  };
  return (
    <section class="curves" aria-label="Curves">
      <div class="bar">
        <Choice legend="Horizontal axis" name="axis" options={AXES} value={axis} choose={chooseAxis} />
        <label class="smoothing">
          Smoothing
          <input
            type="range"
            min="0"
            max="0.99"
            step="0.01"
            value={smoothing}
            onInput={(event) => chooseSmoothing(event.currentTarget.value)}
          />
          <output>{smoothing.toFixed(2)}</output>
        </label>
        <input
          type="search"
          placeholder="Filter metrics"
          aria-label="Filter metrics"
          value={filter}
          onInput={(event) => setFilter(event.currentTarget.value)}
        />
        <button type="button" disabled={!names.length} onClick={() => download(runs)}>
          Export CSV
        </button>
      </div>
      {shown.length === 0 && <p class="empty">{names.length ? `No metric has “${filter}” in its name.` : empty}</p>}
      <div class="charts">
        {shown.map((name) => (
          <Chart key={name} name={name} runs={runs} axis={axis} smoothing={smoothing} />
        ))}
      </div>
    </section>
  );
}

function download(runs: ChartedRun[]): void {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([csv(runs.map((run) => [run.id, run.points]))], { type: "text/csv" }));
  link.download = runs.length === 1 ? `${runs[0]!.id}.csv` : "runs.csv";
  link.click();
  URL.revokeObjectURL(link.href);
}
