// The table of checkpoints with the step, the reward and the loss at each save, and what can be done with them.
import { useEffect, useRef, useState } from "preact/hooks";
import { caller, listSavedCheckpoints, request } from "./api";
import type { SavedCheckpoint } from "./api_types";
import { poll } from "./live";
import { url } from "./logic/addresses";
import { bestOfRun, inOrder, NEWEST_FIRST, pathParts, type CheckpointSort } from "./logic/checkpoints";
import { ago, bytes, dateTime, duration, number, shortName } from "./logic/format";
import { orderAfter } from "./logic/orders";
import { shortId } from "./logic/runs";
import { rounded } from "./logic/series";
import { Copy, Wide } from "./parts";
import { address } from "./router";
import { SortedHeads, type SortedColumn } from "./sorted_heads";

const PAGE = 100;
const POLL_SECONDS = 10;
const DAY = 86400;
// What a checkpoint's expiry can be set to; null: never.
const LIFETIMES: [string, number | null][] = [
  ["in 1 day", DAY],
  ["in 7 days", 7 * DAY],
  ["in 30 days", 30 * DAY],
  ["never", null],
];

type RunNames = ReadonlyMap<string, string>; // by ID
type Change = (method: string, path: string, body?: unknown) => void;

export interface Listed {
  saved: SavedCheckpoint[] | null; // null: not known yet
  total: number;
  metrics: string[]; // that stand to choice
  error: string | null;
  change: Change;
  older: () => void;
}

/** Lists checkpoints and follows them. `run`: null for all; `metric`: "" for the reward. */
export function useSavedCheckpoints(run: string | null, metric: string): Listed {
  const [saved, setSaved] = useState<SavedCheckpoint[] | null>(null);
  const [total, setTotal] = useState(0);
  const [metrics, setMetrics] = useState<string[]>([]);
  const [error, setError] = useState<string | null>(null);
  const count = useRef(PAGE); // that are shown at most
  const load = async () => {
    const found: SavedCheckpoint[] = [];
    const names = new Set<string>();
    for (let isWhole = false; !isWhole; ) {
      const page = await listSavedCheckpoints(run, metric, found.length);
      found.push(...page.checkpoints);
      for (const name of page.metrics) names.add(name);
      setTotal(page.cursor.total_count);
      const known = Math.min(count.current, page.cursor.total_count);
      isWhole = page.checkpoints.length === 0 || found.length >= known;
    }
    setSaved(found);
    setMetrics([...names]);
    setError(null);
  };
  const failed = (refused: Error) => setError(refused.message);
  useEffect(() => poll(load, POLL_SECONDS, failed), [run, metric]);
  return {
    saved,
    total,
    metrics,
    error,
    change: (method, path, body) => void request(method, path, body).then(load).catch(failed),
    older: () => {
      count.current += PAGE;
      load().catch(failed);
    },
  };
}

export function MetricChoice({
  metrics,
  metric,
  choose,
}: {
  metrics: string[];
  metric: string;
  choose: (metric: string) => void;
}) {
  const options = metric && !metrics.includes(metric) ? [metric, ...metrics] : metrics;
  return (
    <label class="check">
      Metric
      <select value={metric} onChange={(event) => choose(event.currentTarget.value)}>
        <option value="">reward</option>
        {options.map((name) => (
          <option key={name} value={name}>
            {name}
          </option>
        ))}
      </select>
    </label>
  );
}

interface TableProps {
  saved: SavedCheckpoint[];
  names: RunNames | null; // of runs; null: all are of one
  metric: string;
  change: Change;
}

export function CheckpointTable({ saved, names, metric, change }: TableProps) {
  const [order, setOrder] = useState(NEWEST_FIRST);
  const columns: SortedColumn<CheckpointSort>[] = [
    ["Name", "name", false],
    ["Kind", null, false],
    ...(names ? [["Run", null, false] as SortedColumn<CheckpointSort>] : []),
    ["Step", "step", true],
    [metric || "Reward", "value", true],
    ["Loss", "loss", true],
    ["Size", "size", true],
    ["Saved", "saved", false],
    ["Expires", null, false],
    ["", null, false],
  ];
  return (
    <Wide label="Checkpoints">
      <table class="rows checkpoints">
        <SortedHeads columns={columns} order={order} sortBy={(sort) => setOrder(orderAfter(order, sort, ["name"]))} />
        <tbody>
          {inOrder(saved, order).map((each) => (
            <Row
              key={each.checkpoint.tinker_path}
              saved={each}
              names={names}
              best={bestOfRun(saved, each)}
              change={change}
            />
          ))}
        </tbody>
      </table>
    </Wide>
  );
}

interface RowProps {
  saved: SavedCheckpoint;
  names: RunNames | null;
  best: string | null; // path of the marked checkpoint of this run that can be sampled
  change: Change;
}

function Row({ saved: { checkpoint, step, metric, value, loss }, names, best, change }: RowProps) {
  const [open, setOpen] = useState(false);
  const { run, route, name } = pathParts(checkpoint.tinker_path);
  const mayChange = caller.value !== null && !caller.value.is_read_only;
  const saved = Date.parse(checkpoint.time) / 1000;
  const expires = checkpoint.expires_at && Date.parse(checkpoint.expires_at) / 1000;
  const remove = () => confirm(`Delete ${checkpoint.tinker_path}? This cannot be undone.`) && change("DELETE", route);
  return (
    <>
      <tr>
        <th scope="row">
          <button
            type="button"
            class="quiet"
            aria-expanded={open}
            aria-label={`Details of ${name}`}
            onClick={() => setOpen(!open)}
          >
            {open ? "▾" : "▸"}
          </button>
          {name} {checkpoint.best && <em class="best">★ best</em>} {checkpoint.public && <em class="good">public</em>}
        </th>
        <td>{checkpoint.checkpoint_type}</td>
        {names && (
          <td>
            <a href={address(url`/runs/${run}`)} title={run}>
              {names.get(run) ?? shortId(run)}
            </a>
          </td>
        )}
        <td class="number">{number(step)}</td>
        <td class="number" title={metric ?? undefined}>
          {number(rounded(metric ?? "", value))}
        </td>
        <td class="number">{number(rounded("loss", loss))}</td>
        <td class="number">{checkpoint.size_bytes == null ? "–" : bytes(checkpoint.size_bytes)}</td>
        <td title={dateTime(saved)}>{ago(saved)}</td>
        <td title={expires ? dateTime(expires) : undefined}>
          {expires ? `in ${duration(Math.max(0, expires - Date.now() / 1000))}` : "never"}
        </td>
        <td class="number">
          {checkpoint.checkpoint_type === "sampler" && (
            <>
              <a href={address(url`/playground?model=${checkpoint.tinker_path}`)}>Sample</a> ·{" "}
              {best && best !== checkpoint.tinker_path && (
                <>
                  <a
                    href={address(url`/playground?model=${checkpoint.tinker_path}&against=${best}`)}
                    aria-label={`Compare with best: ${name}`}
                  >
                    Compare with best
                  </a>{" "}
                  ·{" "}
                </>
              )}
            </>
          )}
          <a href={`${route}/archive`} download>
            Download
          </a>
        </td>
      </tr>
      {open && (
        <tr>
          <td colSpan={names ? 10 : 9}>
            <p>
              <code>{checkpoint.tinker_path}</code>
              <Copy text={checkpoint.tinker_path} />
            </p>
            <dl class="facts">
              <div>
                <dt>Base model</dt>
                <dd title={checkpoint.base_model ?? undefined}>
                  {checkpoint.base_model ? shortName(checkpoint.base_model) : "–"}
                </dd>
              </div>
              <div>
                <dt>Saved</dt>
                <dd>{dateTime(saved)}</dd>
              </div>
              <div>
                <dt>Expires</dt>
                <dd>{expires ? dateTime(expires) : "never"}</dd>
              </div>
              {Object.entries(checkpoint.user_metadata ?? {}).map(([key, value]) => (
                <div key={key}>
                  <dt>{key}</dt>
                  <dd>{String(value)}</dd>
                </div>
              ))}
            </dl>
            {mayChange && (
              <p class="bar">
                <span class="group" role="group" aria-label="Set when it expires">
                  <span class="dim">Expire</span>
                  {LIFETIMES.map(([label, seconds]) => (
                    <button
                      type="button"
                      key={label}
                      onClick={() => change("PUT", `${route}/ttl`, { ttl_seconds: seconds })}
                    >
                      {label}
                    </button>
                  ))}
                </span>
                <button type="button" onClick={() => change(checkpoint.best ? "DELETE" : "POST", `${route}/best`)}>
                  {checkpoint.best ? "Take the mark away" : "Mark as the best of its run"}
                </button>
                <button type="button" onClick={() => change(checkpoint.public ? "DELETE" : "POST", `${route}/publish`)}>
                  {checkpoint.public ? "Unpublish" : "Publish"}
                </button>
                <button type="button" class="bad" onClick={remove}>
                  Delete
                </button>
              </p>
            )}
          </td>
        </tr>
      )}
    </>
  );
}
