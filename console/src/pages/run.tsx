// One training run: what it is, and its curves.
import { useEffect, useState } from "preact/hooks";
import { getRun } from "../api";
import type { Run as RunFacts } from "../api_types";
import { Curves } from "../curves";
import { poll, watch } from "../live";
import { ago, dateTime, number } from "../logic/format";
import { failureText, healthClass, healthText, runName } from "../logic/runs";
import { Copy, Loading, Problem } from "../parts";
import { RunHeader } from "../run_header";
import { LabelForm, mayChange } from "../run_labels";

const POLL_SECONDS = 3;

export function Run({ id }: { id: string }) {
  const [run, setRun] = useState<RunFacts | null>(null);
  const [error, setError] = useState<string | null>(null);
  useEffect(() => {
    const show = (facts: RunFacts) => {
      setRun(facts);
      setError(null);
    };
    const failed = (refused: Error) => setError(refused.message);
    const load = () => getRun(id).then(show);
    const endPoll = poll(load, POLL_SECONDS, failed); // a client that is gone brings no news
    const endWatch = watch((changed) => {
      if (changed !== "all" && !changed.has(id)) return;
      load().catch(failed);
    });
    return () => {
      endPoll();
      endWatch();
    };
  }, [id]);
  return (
    <>
      <RunHeader id={id} run={run} />
      <Problem text={error} />
      {!run && !error && <Loading />}
      {run?.alarms.map((alarm) => (
        <p key={alarm} class="alarm">
          {alarm}
        </p>
      ))}
      {run && <Failure run={run} />}
      {run && <Facts run={run} />}
      {run && mayChange() && <LabelForm key={run.id} run={run} renew={setRun} />}
      {run && <Curves runs={[{ id, label: runName(run), color: "#3b7dd8" }]} empty="This run has no steps yet." />}
    </>
  );
}

function Failure({ run }: { run: RunFacts }) {
  const failure = run.health.last_failure;
  if (!failure) return null;
  return (
    <p class="failure">
      <strong>Last failure</strong> {ago(failure.at)}: {failureText(run.health)}{" "}
      <small>
        request <code>{failure.request_id}</code>
        <Copy text={failure.request_id} />
      </small>
    </p>
  );
}

function Facts({ run }: { run: RunFacts }) {
  const facts: [string, string][] = [
    ["Run", run.id],
    ["Base model", run.base_model],
    ["Owner", run.owner],
    ["LoRA rank", String(run.rank)],
    ["Created", dateTime(run.created_at)],
    ...(run.group ? [["Group", run.group] as [string, string]] : []),
    ...(run.archived_at ? [["Archived", ago(run.archived_at)] as [string, string]] : []),
    ["State", healthText(run.health)],
    ["Steps", number(run.steps)],
    ["Last step", ago(run.last_at)],
    ...(run.health.failed > 0
      ? [["Failed requests", `${number(run.health.failed)} in the last 15 min`] as [string, string]]
      : []),
    ...Object.entries(run.metadata ?? {})
      .filter(([, value]) => value !== runName(run))
      .map(([name, value]): [string, string] => [name, typeof value === "string" ? value : JSON.stringify(value)]),
  ];
  return (
    <dl class="facts">
      {facts.map(([name, value]) => (
        <div key={name}>
          <dt>{name}</dt>
          <dd class={name === "State" ? healthClass(run.health) : undefined}>
            {value || "–"}
            {name === "Run" && <Copy text={value} />}
          </dd>
        </div>
      ))}
    </dl>
  );
}
