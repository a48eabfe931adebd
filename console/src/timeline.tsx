// The requests of a run as bars over time, packed into lanes, in the colours of their stages.
import type { StageName, TimedRequest, Timing } from "./api";
import { duration, span } from "./format";
import { Wide } from "./parts";

const WIDTH = 1200; // of the drawing, which is stretched
const LANE = 9;
const GAP = 2;
const MOST_LANES = 24; // of training, and of sampling

const STAGES: Record<StageName, string> = {
  queued: "waits for its turn in the run",
  batched: "waits for devices",
  compiling: "waits for a program",
  device: "on devices",
  encoded: "result is stored",
};

export function Requests({ facts }: { facts: Timing }) {
  const training = facts.requests.filter((request) => request.kind !== "sample");
  const sampling = facts.requests.filter((request) => request.kind === "sample");
  if (!facts.requests.length) return null;
  return (
    <Wide label="Requests">
      <h2>Requests</h2>
      <ul class="legend">
        {(Object.keys(STAGES) as StageName[]).map((stage) => <li key={stage}><i class={`key s-${stage}`} />{stage} <small>{STAGES[stage]}</small></li>)}
        <li><i class="key c-client" />client <small>no request is at the server</small></li>
      </ul>
      {facts.is_cut && <p class="note">Only the newest {facts.requests.length} requests are shown.</p>}
      <Lanes name="Training" requests={training} facts={facts} />
      <Lanes name="Sampling" requests={sampling} facts={facts} />
      <Waiting facts={facts} />
      <Axis facts={facts} />
    </Wide>
  );
}

function Lanes({ name, requests, facts }: { name: string; requests: TimedRequest[]; facts: Timing }) {
  const lanes = packed(requests);
  if (!lanes.length) return null;
  const shown = lanes.slice(0, MOST_LANES);
  const scale = WIDTH / (facts.until - facts.since);
  return (
    <div class="lanes">
      <h3>{name}</h3>
      <svg viewBox={`0 0 ${WIDTH} ${shown.length * (LANE + GAP)}`} height={shown.length * (LANE + GAP)} preserveAspectRatio="none" role="img" aria-label={`${requests.length} requests of ${name.toLowerCase()} over time`}>
        {shown.map((lane, i) => lane.map((request) => <Bar key={request.number} request={request} y={i * (LANE + GAP)} since={facts.since} scale={scale} />))}
      </svg>
      {lanes.length > shown.length && <p class="note">{lanes.length - shown.length} more requests at the same time are not drawn.</p>}
    </div>
  );
}

/** The times in which the run had no request at the server: the client was busy, or waited for something else. */
function Waiting({ facts }: { facts: Timing }) {
  const scale = WIDTH / (facts.until - facts.since);
  const gaps = without(facts);
  return (
    <div class="lanes">
      <h3>Waiting for the client</h3>
      <svg viewBox={`0 0 ${WIDTH} ${LANE}`} height={LANE} preserveAspectRatio="none" role="img" aria-label={`${gaps.length} times without a request, ${span(gaps.reduce((sum, [begin, end]) => sum + end - begin, 0))} in all`}>
        {gaps.map(([begin, end]) => <g key={begin}><title>{`no request for ${span(end - begin)}`}</title><rect class="c-client" x={(begin - facts.since) * scale} width={(end - begin) * scale} height={LANE} /></g>)}
      </svg>
    </div>
  );
}

/** The times in which none of the requests was unfinished. Before the first of a list that was cut, nothing is known. */
function without(facts: Timing): [number, number][] {
  const spans = facts.requests.map(({ stages }): [number, number] => [stages[0]?.[1] ?? 0, stages.at(-1)?.[2] ?? 0]).sort((a, b) => a[0] - b[0]);
  const gaps: [number, number][] = [];
  let end = facts.is_cut ? (spans[0]?.[0] ?? facts.until) : facts.since;
  for (const [began, ended] of [...spans, [facts.until, facts.until] as const]) {
    if (began > end) gaps.push([end, began]);
    end = Math.max(end, ended);
  }
  return gaps;
}

function Bar({ request, y, since, scale }: { request: TimedRequest; y: number; since: number; scale: number }) {
  const took = request.stages.map(([stage, begin, end]) => `${stage} ${span(end - begin)}`).join(", ");
  return (
    <g>
      <title>{`${request.kind} ${request.seq_id}, ${request.state}: ${took}${request.reason ? `; ${request.reason}` : ""}`}</title>
      {request.stages.map(([stage, begin, end], i) => {
        const x = Math.max(0, (begin - since) * scale);
        const right = (end - since) * scale;
        return right > 0 && <rect key={i} class={`s-${stage}`} x={x} y={y} width={Math.max(1, right - x)} height={LANE} />;
      })}
    </g>
  );
}

export function Axis({ facts }: { facts: Pick<Timing, "since" | "until"> }) {
  const whole = facts.until - facts.since;
  const marks = [1, 0.8, 0.6, 0.4, 0.2, 0];
  const shown = (seconds: number) => (whole < 120 ? `${Math.round(seconds)} s` : duration(seconds));
  return <div class="axis" aria-hidden="true">{marks.map((part) => <span key={part}>{part ? `−${shown(part * whole)}` : "now"}</span>)}</div>;
}

/** Puts each request into the first lane that is free when it begins. */
function packed(requests: TimedRequest[]): TimedRequest[][] {
  const lanes: { end: number; requests: TimedRequest[] }[] = [];
  const begin = (request: TimedRequest) => request.stages[0]?.[1] ?? 0;
  for (const request of [...requests].sort((a, b) => begin(a) - begin(b))) {
    let lane = lanes.find(({ end }) => end <= begin(request));
    if (!lane) lanes.push((lane = { end: 0, requests: [] }));
    lane.requests.push(request);
    lane.end = request.stages.at(-1)?.[2] ?? 0;
  }
  return lanes.map((lane) => lane.requests);
}
