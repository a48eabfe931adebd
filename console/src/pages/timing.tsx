// Where the time of one run goes: in words, as shares, over time, and request by request.
import { useEffect, useState } from "preact/hooks";
import { getTiming, type Cause, type Timing as Facts, type TimedRequest } from "../api";
import { percent, span } from "../format";
import { poll } from "../live";
import { Loading, Wide } from "../parts";
import { place, remember } from "../router";
import { RunHeader, useRun } from "../run_header";
import { Axis, Requests } from "../timeline";

const POLL_SECONDS = 3;
const WINDOWS = [[60, "1 min"], [300, "5 min"], [900, "15 min"]] as const;
const SLOWEST = 8;

const CAUSES: Record<Cause, string> = {
  device: "Device",
  queue: "Queue",
  compile: "Compile",
  client: "Client",
  restart: "Restart",
  server: "Server",
};

export function Timing({ id }: { id: string }) {
  const [seconds, setSeconds] = useState(Number(place.value.query.get("seconds")) || 300);
  const [facts, setFacts] = useState<Facts | null>(null);
  const [error, setError] = useState<string | null>(null);
  const run = useRun(id);
  const load = () => getTiming(id, seconds).then((found) => (setFacts(found), setError(null)), (refused: Error) => setError(refused.message));
  useEffect(() => poll(load, POLL_SECONDS), [id, seconds]);
  return (
    <>
      <RunHeader id={id} run={run} />
      <div class="bar">
        <fieldset class="choice">
          <legend class="hidden">Window</legend>
          {WINDOWS.map(([value, name]) => (
            <label key={value}>
              <input type="radio" name="window" checked={seconds === value} onChange={() => (setSeconds(value), remember({ seconds: value === 300 ? "" : String(value) }))} />
              <span>{name}</span>
            </label>
          ))}
        </fieldset>
        {facts && facts.until - facts.since < seconds - 5 && <span class="note">known for {span(facts.until - facts.since)}</span>}
      </div>
      {error && <p class="problem" role="alert">{error}</p>}
      {!facts && !error && <Loading />}
      {facts && <Why facts={facts} />}
      {facts && <Requests facts={facts} />}
      {facts && <Slowest requests={facts.requests} />}
    </>
  );
}

function Why({ facts }: { facts: Facts }) {
  const whole = facts.until - facts.since;
  return (
    <section class="why" aria-label="Why it takes so long">
      <p class="summary">{facts.summary}</p>
      <Bar facts={facts} />
      <div class="columns">
        <table class="shares">
          <thead class="hidden"><tr><th scope="col">Cause</th><th scope="col">Share</th><th scope="col">Time</th><th scope="col">What helps</th></tr></thead>
          <tbody>
            {facts.shares.map(({ cause, seconds, advice }) => (
              <tr key={cause}>
                <th scope="row"><i class={`key c-${cause}`} />{CAUSES[cause]}</th>
                <td class="number">{percent(seconds, whole)}</td>
                <td class="number dim">{span(seconds)}</td>
                <td class="dim">{seconds > 0.05 * whole && advice}</td>
              </tr>
            ))}
          </tbody>
        </table>
        <div><OverTime facts={facts} /><Axis facts={facts} /></div>
      </div>
    </section>
  );
}

function Bar({ facts }: { facts: Facts }) {
  const whole = facts.until - facts.since;
  let x = 0;
  const label = facts.shares.map(({ cause, seconds }) => `${CAUSES[cause]} ${percent(seconds, whole)}`).join(", ");
  return (
    <svg class="share-bar" viewBox="0 0 1000 10" preserveAspectRatio="none" role="img" aria-label={label}>
      {facts.shares.map(({ cause, seconds }) => {
        const width = (1000 * seconds) / whole;
        const rect = <rect key={cause} class={`c-${cause}`} x={x} width={width} height="10" />;
        x += width;
        return rect;
      })}
    </svg>
  );
}

/** Columns of the seconds of each cause, one for each slice. */
function OverTime({ facts }: { facts: Facts }) {
  const width = 600;
  const height = 84;
  const scale = width / (facts.until - facts.since);
  return (
    <svg class="over-time" viewBox={`0 0 ${width} ${height}`} preserveAspectRatio="none" role="img" aria-label="Shares of the causes over time">
      {facts.slices.map((slice, i) => {
        const end = facts.slices[i + 1]?.at ?? facts.until;
        const whole = end - slice.at;
        let y = height;
        return (Object.keys(CAUSES) as Cause[]).map((cause) => {
          const tall = whole > 0 ? (height * slice.seconds[cause]) / whole : 0;
          y -= tall;
          return tall > 0 && <rect key={`${i} ${cause}`} class={`c-${cause}`} x={(slice.at - facts.since) * scale} y={y} width={Math.max(0.5, whole * scale - 1)} height={tall} />;
        });
      })}
    </svg>
  );
}

function Slowest({ requests }: { requests: TimedRequest[] }) {
  const timed = requests.map((request) => {
    const took: Record<string, number> = {};
    for (const [stage, begin, end] of request.stages) took[stage] = (took[stage] ?? 0) + end - begin;
    return { request, took, all: Object.values(took).reduce((sum, part) => sum + part, 0) };
  });
  const slowest = timed.sort((a, b) => b.all - a.all).slice(0, SLOWEST);
  if (!slowest.length) return null;
  const stages = ["queued", "batched", "compiling", "device", "encoded"] as const;
  return (
    <Wide label="Slowest requests">
      <h2>Slowest requests</h2>
      <table class="rows">
        <thead>
          <tr>
            <th scope="col">Request</th><th scope="col" class="number">Tokens</th><th scope="col" class="number">Took</th>
            {stages.map((stage) => <th key={stage} scope="col" class="number">{stage[0]!.toUpperCase() + stage.slice(1)}</th>)}
            <th scope="col">State</th>
          </tr>
        </thead>
        <tbody>
          {slowest.map(({ request, took, all }) => (
            <tr key={request.number}>
              <th scope="row">{request.kind} {request.seq_id}</th>
              <td class="number">{request.tokens?.toLocaleString("en") ?? "–"}</td>
              <td class="number">{span(all)}</td>
              {stages.map((stage) => <td key={stage} class="number dim">{took[stage] === undefined ? "" : span(took[stage])}</td>)}
              <td>{request.reason ?? request.state}</td>
            </tr>
          ))}
        </tbody>
      </table>
    </Wide>
  );
}
