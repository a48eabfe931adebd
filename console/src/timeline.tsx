// The requests of a run as bars over time, packed into lanes, in the colours of their stages.
import type { StageName, TimedRequest, Timing } from "./api";
import { span } from "./format";

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
    <section class="wide">
      <h2>Requests</h2>
      <ul class="legend">
        {(Object.keys(STAGES) as StageName[]).map((stage) => <li key={stage}><i class={`key s-${stage}`} />{stage} <small>{STAGES[stage]}</small></li>)}
      </ul>
      {facts.is_cut && <p class="note">Only the newest {facts.requests.length} requests are shown.</p>}
      <Lanes name="Training" requests={training} facts={facts} />
      <Lanes name="Sampling" requests={sampling} facts={facts} />
      <Axis facts={facts} />
    </section>
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

function Axis({ facts }: { facts: Timing }) {
  const whole = facts.until - facts.since;
  const marks = [1, 0.75, 0.5, 0.25, 0];
  return <div class="axis" aria-hidden="true">{marks.map((part) => <span key={part}>{part ? `−${span(part * whole)}` : "now"}</span>)}</div>;
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
