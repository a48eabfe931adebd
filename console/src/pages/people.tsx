// Who has API keys, what their owners have used by the hour, and who did what: for admins.
import { useEffect, useState } from "preact/hooks";
import { getAudit, getKeys, getUse, request } from "../api";
import type { AuditEntry, Key, KeysResponse, UseResponse } from "../api_types";
import { poll } from "../live";
import { url } from "../logic/addresses";
import { fits } from "../logic/filters";
import { ago, dateTime, number } from "../logic/format";
import { HOUR, perHour, sum } from "../logic/usage";
import { Choice, Columns, Head, Loading, Problem, Wide } from "../parts";
import { place, remember } from "../router";

const POLL_SECONDS = 5;
const WINDOWS: [number, string][] = [
  [24, "24 hours"],
  [168, "7 days"],
];
const AMOUNTS = [
  ["trained", "Trained on"],
  ["forwarded", "Only scored"],
  ["prompt", "Prompts"],
  ["cached", "Of prompts, cached"],
  ["sampled", "Sampled"],
] as const;
const HOURLY = {
  trained: "Tokens trained on, per hour",
  prompt: "Tokens of prompts, per hour",
  sampled: "Tokens sampled, per hour",
};
const AMOUNT_NAMES = AMOUNTS.map(([, name]) => name);
const MOST_ENTRIES = 200;

export function People() {
  const [error, setError] = useState<string | null>(null);
  const failed = (refused: Error | null) => setError(refused?.message ?? null);
  return (
    <>
      <div class="bar">
        <h1>People</h1>
      </div>
      <Problem text={error} />
      <Keys failed={failed} />
      <Usage failed={failed} />
      <Audit failed={failed} />
    </>
  );
}

const count = (tokens: number) => Math.round(tokens).toLocaleString("en"); // however large

type Part = { failed: (refused: Error | null) => void };

function Keys({ failed }: Part) {
  const [listing, setListing] = useState<KeysResponse | null>(null);
  const [withOld, setOld] = useState(false);
  const load = () =>
    getKeys().then((keys) => {
      setListing(keys);
      failed(null);
    });
  useEffect(() => poll(load, POLL_SECONDS, failed), []);
  const revoke = (key: Key) => {
    const whose = key.is_own ? "the key that you have signed in with" : `key ${key.id} of ${key.owner}`;
    if (confirm(`Revoke ${whose}? This cannot be undone.`))
      request("DELETE", url`/console/api/keys/${key.id}`).then(load).catch(failed);
  };
  if (!listing) return <Loading />;
  const shown = listing.keys.filter((key) => withOld || !key.problem);
  return (
    <Wide label="API keys">
      <h2>API keys</h2>
      {listing.keys.length === 0 && (
        <p class="empty">
          There are no keys, so everyone who can reach the server has access. <code>spmd-tx keys create</code> makes
          one.
        </p>
      )}
      {listing.keys.length > 0 && (
        <>
          <label class="check">
            <input type="checkbox" checked={withOld} onChange={(event) => setOld(event.currentTarget.checked)} /> Show
            revoked and expired keys
          </label>
          <table class="rows">
            <Head names={["Owner", "ID", "Role", "Limits", "Created", "Expires", "Last used", "State", ""]} />
            <tbody>
              {shown.map((key) => (
                <tr key={key.id}>
                  <th scope="row">{key.owner}</th>
                  <td>
                    <code>{key.id}</code>
                    {key.is_own && <small>yours</small>}
                  </td>
                  <td>{key.role}</td>
                  <td>
                    {Object.entries(key.limits)
                      .map(([name, amount]) => `${number(amount)} ${name.replaceAll("_", " ")}`)
                      .join(", ") || "none"}
                  </td>
                  <td title={dateTime(key.created_at)}>{ago(key.created_at)}</td>
                  <td>{key.expires_at === null ? "never" : dateTime(key.expires_at)}</td>
                  <td title={key.last_used_at === null ? undefined : dateTime(key.last_used_at)}>
                    {key.last_used_at === null ? "never" : ago(key.last_used_at)}
                  </td>
                  <td>{key.problem ? <span class="bad">{key.problem}</span> : <span class="good">valid</span>}</td>
                  <td>
                    {!key.problem && (
                      <button
                        type="button"
                        class="bad"
                        aria-label={`Revoke key ${key.id} of ${key.owner}`}
                        onClick={() => revoke(key)}
                      >
                        Revoke
                      </button>
                    )}
                  </td>
                </tr>
              ))}
            </tbody>
          </table>
          {listing.left_out > 0 && <p class="note">and {number(listing.left_out)} older ones</p>}
          <p class="note">
            <code>spmd-tx keys create</code> makes a key, with its limits, and <code>spmd-tx keys rotate</code> replaces
            one.
          </p>
        </>
      )}
    </Wide>
  );
}

function Usage({ failed }: Part) {
  const [hours, setHours] = useState(Number(place.value.query.get("hours")) || 24);
  const [owner, setOwner] = useState("");
  const [use, setUse] = useState<UseResponse | null>(null);
  useEffect(() => poll(() => getUse(hours).then(setUse), 2 * POLL_SECONDS, failed), [hours]);
  if (!use) return null;
  const choose = (value: number) => {
    setHours(value);
    remember({ hours: value === 24 ? "" : String(value) });
  };
  const owners = [...new Set(use.hours.map((each) => each.owner))].sort();
  const wanted = use.hours.filter((each) => !owner || each.owner === owner);
  return (
    <Wide label="Usage">
      <h2>
        Usage <small>in tokens</small>
      </h2>
      <div class="bar">
        <Choice legend="Time" name="hours" options={WINDOWS} value={hours} choose={choose} />
        <label class="check">
          Owner
          <select value={owner} onChange={(event) => setOwner(event.currentTarget.value)}>
            <option value="">all</option>
            {owners.map((name) => (
              <option key={name}>{name}</option>
            ))}
          </select>
        </label>
      </div>
      <div class="charts three">
        {(["trained", "prompt", "sampled"] as const).map((amount) => (
          <Columns
            key={amount}
            name={HOURLY[amount]}
            values={perHour(use, wanted, amount)}
            seconds={HOUR}
            show={count}
          />
        ))}
      </div>
      {owners.length === 0 && <p class="empty">Nobody has trained or sampled in this time.</p>}
      {owners.length > 0 && (
        <table class="rows">
          <Head names={["Owner", ...AMOUNT_NAMES]} numbers={AMOUNT_NAMES} />
          <tbody>
            {owners.map((name) => (
              <tr key={name}>
                <th scope="row">{name}</th>
                {AMOUNTS.map(([amount]) => (
                  <td key={amount} class="number">
                    {count(
                      sum(
                        use.hours.filter((each) => each.owner === name),
                        amount,
                      ),
                    )}
                  </td>
                ))}
              </tr>
            ))}
          </tbody>
        </table>
      )}
      {use.is_cut && <p class="problem">There are more owners and hours than are shown; choose a shorter time.</p>}
    </Wide>
  );
}

function Audit({ failed }: Part) {
  const today = new Date().toISOString().slice(0, 10);
  const [day, setDay] = useState(today);
  const [filter, setFilter] = useState("");
  const [entries, setEntries] = useState<AuditEntry[] | null>(null);
  const [isCut, setIsCut] = useState(false);
  const load = () =>
    getAudit(day).then((audit) => {
      setEntries(audit.entries.reverse());
      setIsCut(audit.next_before != null);
    });
  useEffect(() => poll(load, 2 * POLL_SECONDS, failed), [day]);
  if (!entries) return null;
  const wanted = entries.filter((each) => fits(filter, JSON.stringify(each)));
  return (
    <Wide label="Audit log">
      <h2>
        Audit log <small>who did what on a day, in UTC</small>
      </h2>
      <div class="bar">
        <label class="check">
          Day{" "}
          <input
            type="date"
            required
            max={today}
            value={day}
            onInput={(event) => event.currentTarget.value && setDay(event.currentTarget.value)}
          />
        </label>
        <input
          type="search"
          placeholder="Filter events"
          aria-label="Filter events"
          value={filter}
          onInput={(event) => setFilter(event.currentTarget.value)}
        />
        <span class="note" role="status">
          {number(wanted.length)} of {number(entries.length)} events
        </span>
      </div>
      {entries.length > 0 && (
        <table class="rows">
          <Head names={["Time", "Event", "Done by", "Owner", "Details"]} />
          <tbody>
            {wanted.slice(0, MOST_ENTRIES).map((each, i) => (
              <Entry key={`${each.timestamp} ${i}`} entry={each} />
            ))}
          </tbody>
        </table>
      )}
      {wanted.length > MOST_ENTRIES && <p class="note">and {number(wanted.length - MOST_ENTRIES)} older ones</p>}
      {isCut && <p class="note">The day has more events than fit here; these are the newest.</p>}
    </Wide>
  );
}

/** A name of an event, or of a fact of it. */
function inWords(name: string): string {
  return name.replaceAll("_", " ").replace(/\bttl\b/, "time to live");
}

function Entry({ entry }: { entry: AuditEntry }) {
  const { actor, api_key_id, owner, ...details } = entry.event_details;
  const facts = Object.entries(details).map(
    ([name, value]) => `${inWords(name)} ${typeof value === "string" ? value : JSON.stringify(value)}`,
  );
  return (
    <tr>
      <td>{entry.timestamp.slice(11, 19)}</td>
      <th scope="row">{inWords(entry.event)}</th>
      <td title={api_key_id ? `with key ${api_key_id}` : undefined}>{String(actor)}</td>
      <td>{String(owner)}</td>
      <td class="dim details">{facts.join(", ")}</td>
    </tr>
  );
}
