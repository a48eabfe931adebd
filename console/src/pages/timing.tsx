// Where the time of one run goes: in words, as shares, over time, and request by request.
import { useEffect, useState } from "preact/hooks";
import { getTiming } from "../api";
import type { RunTiming, TimedRequest } from "../api_types";
import { poll } from "../live";
import { stacked } from "../logic/bars";
import { percent, span } from "../logic/format";
import { CAUSE_NAMES, columns, slowest, STAGE_NAMES, STAGES } from "../logic/timeline";
import { Choice, Head, Loading, Problem, Wide } from "../parts";
import { place, remember } from "../router";
import { RunHeader, useRun } from "../run_header";
import { Axis, Requests } from "../timeline";

const POLL_SECONDS = 3;
const WINDOWS: [number, string][] = [
  [60, "1 min"],
  [300, "5 min"],
  [900, "15 min"],
];
const SLOWEST = 8;

export function Timing({ id }: { id: string }) {
  const [seconds, setSeconds] = useState(Number(place.value.query.get("seconds")) || 300);
  const [timing, setTiming] = useState<RunTiming | null>(null);
  const [error, setError] = useState<string | null>(null);
  const run = useRun(id);
  const show = (news: RunTiming) => {
    setTiming(news);
    setError(null);
  };
  const failed = (refused: Error) => setError(refused.message);
  useEffect(() => poll(() => getTiming(id, seconds).then(show), POLL_SECONDS, failed), [id, seconds]);
  const choose = (value: number) => {
    setSeconds(value);
    remember({ seconds: value === 300 ? "" : String(value) });
  };
  return (
    <>
      <RunHeader id={id} run={run} />
      <div class="bar">
        <Choice legend="Window" name="window" options={WINDOWS} value={seconds} choose={choose} />
        {timing && timing.until - timing.since < seconds - 5 && (
          <span class="note">the last {span(timing.until - timing.since)}, as far as the server remembers</span>
        )}
      </div>
      <Problem text={error} />
      {!timing && !error && <Loading />}
      {timing && <Why timing={timing} />}
      {timing && <Requests timing={timing} />}
      {timing && <Slowest requests={timing.requests} />}
    </>
  );
}

/** Which workers the run needs, where the server has several groups or they do not work. */
function Workers({ timing: { group } }: { timing: RunTiming }) {
  if (group === null) return <p class="problem">The base model of this run is not served now. Its requests wait.</p>;
  if (group.is_only && group.state === "ready") return null;
  return (
    <p class={group.state === "failed" ? "problem" : "note"}>
      The run needs the workers of the group {group.name}: {group.state === "ready" ? "ready" : group.phase}. Other
      groups do not count here.
    </p>
  );
}

function Why({ timing }: { timing: RunTiming }) {
  const whole = timing.until - timing.since;
  return (
    <section class="why" aria-label="Why it takes so long">
      <p class="summary">{timing.summary}</p>
      <Workers timing={timing} />
      <Bar timing={timing} />
      <div class="columns">
        <table class="shares">
          <thead class="hidden">
            <tr>
              <th scope="col">Cause</th>
              <th scope="col">Share</th>
              <th scope="col">Time</th>
              <th scope="col">What helps</th>
            </tr>
          </thead>
          <tbody>
            {timing.shares.map(({ cause, seconds, advice }) => (
              <tr key={cause}>
                <th scope="row">
                  <i class={`key c-${cause}`} />
                  {CAUSE_NAMES[cause]}
                </th>
                <td class="number">{percent(seconds, whole)}</td>
                <td class="number dim">{span(seconds)}</td>
                <td class="dim">{seconds > 0.05 * whole && advice}</td>
              </tr>
            ))}
          </tbody>
        </table>
        <div>
          <OverTime timing={timing} />
          <Axis timing={timing} />
        </div>
      </div>
    </section>
  );
}

function Bar({ timing }: { timing: RunTiming }) {
  const whole = timing.until - timing.since;
  const bars = stacked(
    timing.shares.map(({ seconds }) => seconds),
    whole,
    1000,
  );
  const label = timing.shares
    .map(({ cause, seconds }) => `${CAUSE_NAMES[cause]} ${percent(seconds, whole)}`)
    .join(", ");
  return (
    <svg class="share-bar" viewBox="0 0 1000 10" preserveAspectRatio="none" role="img" aria-label={label}>
      {timing.shares.map(({ cause }, i) => (
        <rect key={cause} class={`c-${cause}`} {...bars[i]} height="10" />
      ))}
    </svg>
  );
}

/** Columns of the seconds of each cause, one for each slice. */
function OverTime({ timing }: { timing: RunTiming }) {
  const width = 600;
  const height = 84;
  return (
    <svg
      class="over-time"
      viewBox={`0 0 ${width} ${height}`}
      preserveAspectRatio="none"
      role="img"
      aria-label="Shares of the causes over time"
    >
      {columns(timing, width, height).map(({ cause, ...column }, i) => (
        <rect key={i} class={`c-${cause}`} {...column} />
      ))}
    </svg>
  );
}

function Slowest({ requests }: { requests: TimedRequest[] }) {
  if (!requests.length) return null;
  const stages = STAGES.map((stage) => STAGE_NAMES[stage]);
  return (
    <Wide label="Slowest requests">
      <h2>Slowest requests</h2>
      <table class="rows">
        <Head names={["Request", "Tokens", "Took", ...stages, "State"]} numbers={["Tokens", "Took", ...stages]} />
        <tbody>
          {slowest(requests, SLOWEST).map(({ request, seconds, total }) => (
            <tr key={request.number}>
              <th scope="row">
                {request.kind} <small title="number of the request in its run or sampler">{request.seq_id}</small>
              </th>
              <td class="number">{request.tokens?.toLocaleString("en") ?? "–"}</td>
              <td class="number">{span(total)}</td>
              {STAGES.map((stage) => (
                <td key={stage} class="number dim">
                  {seconds[stage] === undefined ? "" : span(seconds[stage])}
                </td>
              ))}
              <td>{request.reason ?? request.state}</td>
            </tr>
          ))}
        </tbody>
      </table>
    </Wide>
  );
}
