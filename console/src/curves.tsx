// The charts of one or several runs, with the choices that hold for all of them.
import { useState } from "preact/hooks";
import { Chart, type Shown } from "./chart";
import { place, remember } from "./router";
import { csv, metricNames, type Axis } from "./series";

export function Curves({ runs, empty }: { runs: Shown[]; empty: string }) {
  const query = place.value.query;
  const [axis, setAxis] = useState<Axis>(query.get("x") === "time" ? "time" : "step");
  const [smoothing, setSmoothing] = useState(weight(query.get("smoothing")));
  const [filter, setFilter] = useState("");
  const names = metricNames(runs.map((run) => run.points));
  const shown = names.filter((name) => name.toLowerCase().includes(filter.toLowerCase()));
  return (
    <section class="curves" aria-label="Curves">
      <div class="bar">
        <fieldset class="choice">
          <legend class="hidden">Horizontal axis</legend>
          {(["step", "time"] as const).map((value) => (
            <label key={value}>
              <input type="radio" name="axis" checked={axis === value} onChange={() => (setAxis(value), remember({ x: value === "time" ? value : "" }))} />
              <span>{value}</span>
            </label>
          ))}
        </fieldset>
        <label class="smoothing">
          Smoothing
          <input type="range" min="0" max="0.99" step="0.01" value={smoothing} onInput={(event) => {
            setSmoothing(weight(event.currentTarget.value));
            remember({ smoothing: weight(event.currentTarget.value) ? event.currentTarget.value : "" });
          }} />
          <output>{smoothing.toFixed(2)}</output>
        </label>
        <input type="search" placeholder="Filter metrics" aria-label="Filter metrics" value={filter} onInput={(event) => setFilter(event.currentTarget.value)} />
        <button type="button" disabled={!names.length} onClick={() => download(runs)}>Export CSV</button>
      </div>
      {shown.length === 0 && <p class="empty">{names.length ? `No metric has “${filter}” in its name.` : empty}</p>}
      <div class="charts">
        {shown.map((name) => <Chart key={name} name={name} runs={runs} axis={axis} smoothing={smoothing} />)}
      </div>
    </section>
  );
}

function weight(text: string | null): number {
  const value = Number(text);
  return value > 0 && value <= 0.99 ? value : 0;
}

function download(runs: Shown[]): void {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([csv(runs.map((run) => [run.id, run.points]))], { type: "text/csv" }));
  link.download = runs.length === 1 ? `${runs[0]!.id}.csv` : "runs.csv";
  link.click();
  URL.revokeObjectURL(link.href);
}
