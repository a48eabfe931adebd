// The checkpoints of one run: which one to go on with.
import { useState } from "preact/hooks";
import { CheckpointTable, MetricChoice, useSavedCheckpoints } from "../checkpoint_table";
import { Loading, Problem } from "../parts";
import { place, remember } from "../router";
import { RunHeader, useRun } from "../run_header";

export function RunCheckpoints({ id }: { id: string }) {
  const [metric, setMetric] = useState(place.value.query.get("metric") ?? "");
  const { saved, total, metrics, error, change, older } = useSavedCheckpoints(id, metric);
  const choose = (name: string) => {
    setMetric(name);
    remember({ metric: name });
  };
  return (
    <>
      <RunHeader id={id} run={useRun(id)} />
      <Problem text={error} />
      {!saved && !error && <Loading />}
      {saved?.length === 0 && (
        <p class="empty">
          This run has no checkpoints. <code>save_state</code> and <code>save_weights_for_sampler</code> with a name
          make one.
        </p>
      )}
      {saved && saved.length > 0 && (
        <>
          <div class="bar">
            <MetricChoice metrics={metrics} metric={metric} choose={choose} />
            <small class="empty">the newest values when it was saved</small>
          </div>
          <CheckpointTable saved={saved} names={null} metric={metric} change={change} />
        </>
      )}
      {saved && saved.length < total && (
        <button type="button" onClick={older}>
          Older checkpoints
        </button>
      )}
    </>
  );
}
