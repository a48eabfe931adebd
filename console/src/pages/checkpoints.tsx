// The checkpoints that the key may see: what they are, when they go, and what can be done with them.
import { useEffect, useRef, useState } from "preact/hooks";
import { caller, listCheckpoints, listRuns, request, type Checkpoint } from "../api";
import { ago, bytes, dateTime, duration, shortName } from "../format";
import { poll } from "../live";
import { Copy, Loading, Wide } from "../parts";
import { address, url } from "../router";
import { runName, shortId } from "../run_header";

const PAGE = 100;
const POLL_SECONDS = 10;
const DAY = 86400;
// What a checkpoint's expiry can be set to; null: never.
const LIFETIMES: [string, number | null][] = [["in 1 day", DAY], ["in 7 days", 7 * DAY], ["in 30 days", 30 * DAY], ["never", null]];

export function Checkpoints() {
  const [found, setFound] = useState<Checkpoint[] | null>(null);
  const [total, setTotal] = useState(0);
  const [filter, setFilter] = useState("");
  const [error, setError] = useState<string | null>(null);
  const [names, setNames] = useState<ReadonlyMap<string, string>>(new Map()); // of runs
  const count = useRef(PAGE); // that are shown at most
  const guarded = (work: Promise<void>) => work.then(() => setError(null), (refused: Error) => setError(refused.message));

  const load = async (offset: number, limit: number) => {
    const page = await listCheckpoints(offset, limit);
    setFound((known) => (offset ? [...(known ?? []), ...page.checkpoints] : page.checkpoints));
    setTotal(page.cursor?.total_count ?? page.checkpoints.length);
  };
  const again = () => guarded(load(0, count.current));
  const change = (method: string, path: string, body?: unknown) =>
    guarded(request(method, path, body).then(() => load(0, count.current)));
  useEffect(() => poll(again, POLL_SECONDS), []);
  useEffect(() => void listRuns(null).then(({ runs }) => setNames(new Map(runs.map((run) => [run.id, runName(run) === run.id ? shortId(run.id) : runName(run)]))), () => undefined), []);

  const words = filter.toLowerCase().split(/\s+/);
  const shown = (found ?? []).filter((each) => words.every((word) => described(each, names).includes(word)));
  return (
    <>
      <div class="bar">
        <h1>Checkpoints</h1>
        <input type="search" placeholder="Filter checkpoints" aria-label="Filter checkpoints" value={filter} onInput={(event) => setFilter(event.currentTarget.value)} />
        {found && <small class="empty">{shown.length} of {total}</small>}
      </div>
      {error && <p class="problem" role="alert">{error}</p>}
      {!found && !error && <Loading />}
      {found && found.length > 0 && shown.length === 0 && <p class="empty">No checkpoint fits “{filter}”.</p>}
      {found?.length === 0 && <p class="empty">There are no checkpoints yet. <code>save_state</code> and <code>save_weights_for_sampler</code> with a name make one.</p>}
      {shown.length > 0 && (
        <Wide label="Checkpoints">
          <table class="rows checkpoints">
            <thead>
              <tr>
                {["Name", "Kind", "Run", "Size", "Saved", "Expires", ""].map((name) => (
                  <th key={name} scope="col" class={name === "Size" ? "number" : undefined}>{name || <span class="unseen">Actions</span>}</th>
                ))}
              </tr>
            </thead>
            <tbody>{shown.map((each) => <Row key={each.tinker_path} checkpoint={each} names={names} change={change} />)}</tbody>
          </table>
        </Wide>
      )}
      {found && found.length < total && <button type="button" onClick={() => ((count.current += PAGE), guarded(load(found.length, PAGE)))}>Older checkpoints</button>}
    </>
  );
}

function Row({ checkpoint, names, change }: { checkpoint: Checkpoint; names: ReadonlyMap<string, string>; change: (method: string, path: string, body?: unknown) => void }) {
  const [open, setOpen] = useState(false);
  const { run, route, name } = parts(checkpoint);
  const mayChange = caller.value !== null && !caller.value.is_read_only;
  const saved = Date.parse(checkpoint.time) / 1000;
  const expires = checkpoint.expires_at && Date.parse(checkpoint.expires_at) / 1000;
  const remove = () => confirm(`Delete ${checkpoint.tinker_path}? This cannot be undone.`) && change("DELETE", route);
  return (
    <>
      <tr>
        <th scope="row">
          <button type="button" class="quiet" aria-expanded={open} aria-label={`Details of ${name}`} onClick={() => setOpen(!open)}>{open ? "▾" : "▸"}</button>
          {name} {checkpoint.public && <em class="good">public</em>}
        </th>
        <td>{checkpoint.checkpoint_type}</td>
        <td><a href={address(url`/runs/${run}`)} title={run}>{names.get(run) ?? shortId(run)}</a></td>
        <td class="number">{checkpoint.size_bytes === null ? "–" : bytes(checkpoint.size_bytes)}</td>
        <td title={dateTime(saved)}>{ago(saved)}</td>
        <td title={expires ? dateTime(expires) : undefined}>{expires ? `in ${duration(Math.max(0, expires - Date.now() / 1000))}` : "never"}</td>
        <td class="number">
          {checkpoint.checkpoint_type === "sampler" && <><a href={address(url`/playground?model=${checkpoint.tinker_path}`)}>Sample</a> · </>}
          <a href={route + "/archive"} download>Download</a>
        </td>
      </tr>
      {open && (
        <tr>
          <td colSpan={7}>
            <p><code>{checkpoint.tinker_path}</code><Copy text={checkpoint.tinker_path} /></p>
            <dl class="facts">
              <div><dt>Base model</dt><dd title={checkpoint.base_model ?? undefined}>{checkpoint.base_model ? shortName(checkpoint.base_model) : "–"}</dd></div>
              <div><dt>Saved</dt><dd>{dateTime(saved)}</dd></div>
              <div><dt>Expires</dt><dd>{expires ? dateTime(expires) : "never"}</dd></div>
              {Object.entries(checkpoint.user_metadata ?? {}).map(([key, value]) => <div key={key}><dt>{key}</dt><dd>{String(value)}</dd></div>)}
            </dl>
            {mayChange && (
              <p class="bar">
                <span class="group" role="group" aria-label="Set when it expires">
                  <span class="dim">Expire</span>
                  {LIFETIMES.map(([label, seconds]) => <button type="button" key={label} onClick={() => change("PUT", route + "/ttl", { ttl_seconds: seconds })}>{label}</button>)}
                </span>
                <button type="button" onClick={() => change(checkpoint.public ? "DELETE" : "POST", route + "/publish")}>{checkpoint.public ? "Unpublish" : "Publish"}</button>
                <button type="button" class="bad" onClick={remove}>Delete</button>
              </p>
            )}
          </td>
        </tr>
      )}
    </>
  );
}

/** Reads tinker://RUN/KIND/NAME: the run, the route of the checkpoint, and its name. */
function parts(checkpoint: Checkpoint): { run: string; route: string; name: string } {
  const [run = "", kind = "", ...rest] = checkpoint.tinker_path.replace("tinker://", "").split("/");
  const name = rest.join("/");
  return { run, name, route: url`/api/v1/training_runs/${run}/checkpoints/${kind}/${name}` };
}

function described(checkpoint: Checkpoint, names: ReadonlyMap<string, string>): string {
  const told = [checkpoint.tinker_path, checkpoint.checkpoint_type, checkpoint.base_model, JSON.stringify(checkpoint.user_metadata ?? "")];
  return [...told, names.get(parts(checkpoint).run), checkpoint.public ? "public" : ""].join(" ").toLowerCase();
}
