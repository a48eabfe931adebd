// The requests of a run as bars over time, packed into lanes, in the colours of their stages.
import type { RunTiming, TimedRequest } from "./api_types";
import { duration, span } from "./logic/format";
import { gaps, lanes, STAGE_NAMES, STAGES, type Stage } from "./logic/timeline";
import { Wide } from "./parts";

const WIDTH = 1200; // of the drawing, which is stretched
const LANE = 9;
const GAP = 2;
const MOST_LANES = 24; // of training, and of sampling

const MEANINGS: Record<Stage, string> = {
  queued: "behind earlier requests of the run",
  batched: "waits for the devices",
  compiling: "waits for a program",
  device: "on the devices",
  encoded: "its result",
};

export function Requests({ timing }: { timing: RunTiming }) {
  const training = timing.requests.filter((request) => request.kind !== "sample");
  const sampling = timing.requests.filter((request) => request.kind === "sample");
  if (!timing.requests.length) return null;
  return (
    <Wide label="Requests">
      <h2>Requests</h2>
      <ul class="legend">
        {STAGES.map((stage) => (
          <li key={stage}>
            <i class={`key s-${stage}`} />
            {STAGE_NAMES[stage]} <small>{MEANINGS[stage]}</small>
          </li>
        ))}
        <li>
          <i class="key c-client" />
          Waiting for the client <small>no request is at the server</small>
        </li>
      </ul>
      {timing.is_cut && <p class="note">Only the newest {timing.requests.length} requests are shown.</p>}
      <Lanes name="Training" requests={training} timing={timing} />
      <Lanes name="Sampling" requests={sampling} timing={timing} />
      <Waiting timing={timing} />
      <Axis timing={timing} />
    </Wide>
  );
}

function Lanes({ name, requests, timing }: { name: string; requests: TimedRequest[]; timing: RunTiming }) {
  const all = lanes(requests);
  if (!all.length) return null;
  const shown = all.slice(0, MOST_LANES);
  const scale = WIDTH / (timing.until - timing.since);
  return (
    <div class="lanes">
      <h3>{name}</h3>
      <svg
        viewBox={`0 0 ${WIDTH} ${shown.length * (LANE + GAP)}`}
        height={shown.length * (LANE + GAP)}
        preserveAspectRatio="none"
        role="img"
        aria-label={`${requests.length} requests of ${name.toLowerCase()} over time`}
      >
        {shown.map((lane, i) =>
          lane.map((request) => (
            <Bar key={request.number} request={request} y={i * (LANE + GAP)} since={timing.since} scale={scale} />
          )),
        )}
      </svg>
      {all.length > shown.length && (
        <p class="note">{all.length - shown.length} more requests at the same time are not drawn.</p>
      )}
    </div>
  );
}

/** The times in which the run had no request at the server: the client was busy, or waited for something else. */
function Waiting({ timing }: { timing: RunTiming }) {
  const scale = WIDTH / (timing.until - timing.since);
  const idle = gaps(timing);
  const inAll = span(idle.reduce((sum, [begin, end]) => sum + end - begin, 0));
  return (
    <div class="lanes">
      <h3>Waiting for the client</h3>
      <svg
        viewBox={`0 0 ${WIDTH} ${LANE}`}
        height={LANE}
        preserveAspectRatio="none"
        role="img"
        aria-label={`${idle.length} times without a request, ${inAll} in all`}
      >
        {idle.map(([begin, end]) => (
          <g key={begin}>
            <title>{`no request for ${span(end - begin)}`}</title>
            <rect class="c-client" x={(begin - timing.since) * scale} width={(end - begin) * scale} height={LANE} />
          </g>
        ))}
      </svg>
    </div>
  );
}

function Bar({ request, y, since, scale }: { request: TimedRequest; y: number; since: number; scale: number }) {
  const seconds = request.stages
    .map(([stage, begin, end]) => `${STAGE_NAMES[stage].toLowerCase()} ${span(end - begin)}`)
    .join(", ");
  const reason = request.reason ? `; ${request.reason}` : "";
  return (
    <g>
      <title>{`${request.kind} ${request.seq_id}, ${request.state}: ${seconds}${reason}`}</title>
      {request.stages.map(([stage, begin, end], i) => {
        const x = Math.max(0, (begin - since) * scale);
        const right = (end - since) * scale;
        return (
          right > 0 && <rect key={i} class={`s-${stage}`} x={x} y={y} width={Math.max(1, right - x)} height={LANE} />
        );
      })}
    </g>
  );
}

export function Axis({ timing }: { timing: Pick<RunTiming, "since" | "until"> }) {
  const whole = timing.until - timing.since;
  const marks = [1, 0.8, 0.6, 0.4, 0.2, 0];
  const shown = (seconds: number) => (whole < 120 ? `${Math.round(seconds)} s` : duration(seconds));
  return (
    <div class="axis" aria-hidden="true">
      {marks.map((part) => (
        <span key={part}>{part ? `−${shown(part * whole)}` : "now"}</span>
      ))}
    </div>
  );
}
