// The checkpoints that the key may see: what they are, when they go, and what can be done with them.
import { useEffect, useRef, useState } from "preact/hooks";
import { caller, listCheckpoints, listRuns, request } from "../api";
import type { Checkpoint } from "../api_types";
import { poll } from "../live";
import { url } from "../logic/addresses";
import { checkpointText, pathParts } from "../logic/checkpoints";
import { fits } from "../logic/filters";
import { ago, bytes, dateTime, duration, shortName } from "../logic/format";
import { runName, shortId } from "../logic/runs";
import { Copy, Head, Loading, Problem, Wide } from "../parts";
import { address } from "../router";

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

export function Checkpoints() {
  const [checkpoints, setCheckpoints] = useState<Checkpoint[] | null>(null);
  const [total, setTotal] = useState(0);
  const [filter, setFilter] = useState("");
  const [error, setError] = useState<string | null>(null);
  const [names, setNames] = useState<ReadonlyMap<string, string>>(new Map()); // of runs
  const count = useRef(PAGE); // that are shown at most
  const guarded = (work: Promise<void>) =>
    work.then(
      () => setError(null),
      (refused: Error) => setError(refused.message),
    );

  const load = async (offset: number, limit: number) => {
    const page = await listCheckpoints(offset, limit);
    setCheckpoints((known) => (offset ? [...(known ?? []), ...page.checkpoints] : page.checkpoints));
    setTotal(page.cursor?.total_count ?? page.checkpoints.length);
  };
  const again = () => load(0, count.current).then(() => setError(null));
  const older = (offset: number) => {
    count.current += PAGE;
    void guarded(load(offset, PAGE));
  };
  const change = (method: string, path: string, body?: unknown) =>
    guarded(request(method, path, body).then(() => load(0, count.current)));
  useEffect(() => poll(again, POLL_SECONDS, (refused) => setError(refused.message)), []);
  useEffect(
    () =>
      void listRuns().then(
        ({ runs }) =>
          setNames(new Map(runs.map((run) => [run.id, runName(run) === run.id ? shortId(run.id) : runName(run)]))),
        () => undefined,
      ),
    [],
  );

  const shown = (checkpoints ?? []).filter((each) => fits(filter, checkpointText(each, names)));
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
        {checkpoints && (
          <small class="empty">
            {shown.length} of {total}
          </small>
        )}
      </div>
      <Problem text={error} />
      {!checkpoints && !error && <Loading />}
      {checkpoints && checkpoints.length > 0 && shown.length === 0 && (
        <p class="empty">No checkpoint fits “{filter}”.</p>
      )}
      {checkpoints?.length === 0 && (
        <p class="empty">
          There are no checkpoints yet. <code>save_state</code> and <code>save_weights_for_sampler</code> with a name
          make one.
        </p>
      )}
      {shown.length > 0 && (
        <Wide label="Checkpoints">
          <table class="rows checkpoints">
            <Head names={["Name", "Kind", "Run", "Size", "Saved", "Expires", ""]} numbers={["Size"]} />
            <tbody>
              {shown.map((each) => (
                <Row key={each.tinker_path} checkpoint={each} names={names} change={change} />
              ))}
            </tbody>
          </table>
        </Wide>
      )}
      {checkpoints && checkpoints.length < total && (
        <button type="button" onClick={() => older(checkpoints.length)}>
          Older checkpoints
        </button>
      )}
    </>
  );
}

function Row({
  checkpoint,
  names,
  change,
}: {
  checkpoint: Checkpoint;
  names: ReadonlyMap<string, string>;
  change: (method: string, path: string, body?: unknown) => void;
}) {
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
          {name} {checkpoint.public && <em class="good">public</em>}
        </th>
        <td>{checkpoint.checkpoint_type}</td>
        <td>
          <a href={address(url`/runs/${run}`)} title={run}>
            {names.get(run) ?? shortId(run)}
          </a>
        </td>
        <td class="number">{checkpoint.size_bytes == null ? "–" : bytes(checkpoint.size_bytes)}</td>
        <td title={dateTime(saved)}>{ago(saved)}</td>
        <td title={expires ? dateTime(expires) : undefined}>
          {expires ? `in ${duration(Math.max(0, expires - Date.now() / 1000))}` : "never"}
        </td>
        <td class="number">
          {checkpoint.checkpoint_type === "sampler" && (
            <>
              <a href={address(url`/playground?model=${checkpoint.tinker_path}`)}>Sample</a> ·{" "}
            </>
          )}
          <a href={`${route}/archive`} download>
            Download
          </a>
        </td>
      </tr>
      {open && (
        <tr>
          <td colSpan={7}>
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
