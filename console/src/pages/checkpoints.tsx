// The checkpoints that the key may see: what they are, when they go, and what can be done with them.
import { useEffect, useState } from "preact/hooks";
import { listRuns } from "../api";
import { CheckpointTable, MetricChoice, useSavedCheckpoints } from "../checkpoint_table";
import { checkpointText } from "../logic/checkpoints";
import { fits } from "../logic/filters";
import { runName, shortId } from "../logic/runs";
import { Loading, Problem } from "../parts";
import { place, remember } from "../router";

export function Checkpoints() {
  const [metric, setMetric] = useState(place.value.query.get("metric") ?? "");
  const { saved, total, metrics, error, change, older } = useSavedCheckpoints(null, metric);
  const [filter, setFilter] = useState("");
  const [names, setNames] = useState<ReadonlyMap<string, string>>(new Map()); // of runs
  useEffect(
    () =>
      void listRuns().then(
        ({ runs }) =>
          setNames(new Map(runs.map((run) => [run.id, runName(run) === run.id ? shortId(run.id) : runName(run)]))),
        () => undefined,
      ),
    [],
  );
  const choose = (name: string) => {
    setMetric(name);
    remember({ metric: name });
  };

  const shown = (saved ?? []).filter(({ checkpoint }) => fits(filter, checkpointText(checkpoint, names)));
  return (
    <>
      <div class="bar">
        <h1>Checkpoints</h1>
        <input
          type="search"
          placeholder="Filter checkpoints"
          aria-label="Filter checkpoints"
          value={filter}
          onInput={(event) => setFilter(event.currentTarget.value)}
        />
        <MetricChoice metrics={metrics} metric={metric} choose={choose} />
        {saved && (
          <small class="empty">
            {shown.length} of {total}
          </small>
        )}
      </div>
      <Problem text={error} />
      {!saved && !error && <Loading />}
      {saved && saved.length > 0 && shown.length === 0 && <p class="empty">No checkpoint fits “{filter}”.</p>}
      {saved?.length === 0 && (
        <p class="empty">
          There are no checkpoints yet. <code>save_state</code> and <code>save_weights_for_sampler</code> with a name
          make one.
        </p>
      )}
      {shown.length > 0 && <CheckpointTable saved={shown} names={names} metric={metric} change={change} />}
      {saved && saved.length < total && (
        <button type="button" onClick={older}>
          Older checkpoints
        </button>
      )}
    </>
  );
}
