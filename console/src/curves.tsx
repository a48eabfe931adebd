// The charts of one or several runs, with the choices that hold for all of them.
import { useEffect, useMemo, useState } from "preact/hooks";
import { metricPages } from "./api";
import { Chart, type ChartedRun } from "./chart";
import { Histories } from "./history";
import { watch } from "./live";
import { url } from "./logic/addresses";
import { fits } from "./logic/filters";
import { csv, type Axis, type Zoom } from "./logic/series";
import { allNames, AUTOMATIC, firstNames, MOST_CHARTS, metricTitle, OVERVIEW, smoothingWeight } from "./logic/series";
import { Choice, Loading, Problem } from "./parts";
import { address, go, place, remember } from "./router";

const AXES = [
  ["step", "step"],
  ["time", "time"],
] as const;

export function Curves({ runs, empty }: { runs: ChartedRun[]; empty: string }) {
  const query = place.value.query;
  const [axis, setAxis] = useState<Axis>(query.get("x") === "time" ? "time" : "step");
  const [smoothing, setSmoothing] = useState(smoothingWeight(query.get("smoothing")));
  const [filter, setFilter] = useState("");
  const [isAll, setAll] = useState(query.get("metrics") === "all");
  const [zoom, setZoom] = useState<Zoom | null>(null);
  const histories = useMemo(() => new Histories(), []);
  const answers = histories.curves.value;
  const ids = runs.map((run) => run.id);
  const names = allNames(ids.map((id) => answers.get(id)?.names ?? []));
  const fitting = names.filter((name) => fits(filter, `${name} ${metricTitle(name) ?? ""}`));
  const asked = isAll || filter ? fitting.slice(0, MOST_CHARTS) : [];
  const curves = ids.map((id) => answers.get(id)?.curves.map((curve) => curve.name) ?? []);
  const drawn = asked.length ? new Set(curves.flat()) : firstNames(curves, OVERVIEW);
  const shown = fitting.filter((name) => drawn.has(name)).slice(0, MOST_CHARTS);
  const view = JSON.stringify({ axis, zoom, names: asked });
  useEffect(() => {
    void histories.show(ids, JSON.parse(view));
    return watch((changed) => void histories.refresh(changed));
  }, [ids.join(), view]);

  const chooseAxis = (value: Axis) => {
    setAxis(value);
    setZoom(null);
    remember({ x: value === "time" ? value : "" });
  };
  const chooseSmoothing = (text: string) => {
    setSmoothing(smoothingWeight(text));
    remember({ smoothing: text });
  };
  const chooseAll = (value: boolean) => {
    setAll(value);
    remember({ metrics: value ? "all" : "" });
  };
  const openSamples = (metric: string, x: number) =>
    go(address(url`/runs/${ids[0]!}/samples?metric=${metric}&axis=${axis}&x=${x}`));
  const open = ids.length === 1 ? openSamples : null;
  const isLoading = ids.some((id) => !answers.has(id)) && histories.error.value === null;
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
            value={smoothing ?? AUTOMATIC}
            onInput={(event) => chooseSmoothing(event.currentTarget.value)}
          />
          <output>{smoothing === null ? "automatic" : smoothing.toFixed(2)}</output>
        </label>
        <input
          type="search"
          placeholder="Filter metrics"
          aria-label="Filter metrics"
          value={filter}
          onInput={(event) => setFilter(event.currentTarget.value)}
        />
        <button type="button" disabled={!names.length} onClick={() => void download(ids)}>
          Export CSV
        </button>
        {zoom && (
          <button type="button" onClick={() => setZoom(null)}>
            Whole run
          </button>
        )}
      </div>
      <Problem text={histories.error.value} />
      {isLoading && ids.length > 0 && <Loading />}
      {shown.length === 0 && !isLoading && (
        <p class="empty">{names.length ? `No metric has “${filter}” in its name.` : empty}</p>
      )}
      <div class="charts">
        {shown.map((name) => (
          <Chart key={name} {...{ name, runs, answers, axis, smoothing, zoom, setZoom, open }} />
        ))}
      </div>
      {!filter && (isAll || names.length > shown.length) && names.length > 0 && (
        <p class="bar">
          <button type="button" onClick={() => chooseAll(!isAll)}>
            {isAll ? "Fewer metrics" : `All ${names.length} metrics`}
          </button>
        </p>
      )}
    </section>
  );
}

/** Saves all points of these runs, which takes a while where they are many. */
async function download(ids: string[]): Promise<void> {
  const runs = await Promise.all(
    ids.map(async (id): Promise<Parameters<typeof csv>[0][number]> => {
      const all: Parameters<typeof csv>[0][number] = [id, [], []];
      for await (const { points, logged } of metricPages(id)) {
        all[1].push(...points);
        all[2].push(...logged);
      }
      return all;
    }),
  );
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([csv(runs)], { type: "text/csv" }));
  link.download = ids.length === 1 ? `${ids[0]!}.csv` : "runs.csv";
  link.click();
  URL.revokeObjectURL(link.href);
}
