// All training runs, as a list with the curves of those that are chosen, or as a table.
import { useEffect, useRef, useState } from "preact/hooks";
import { caller } from "../api";
import type { Run } from "../api_types";
import { Swatch } from "../chart";
import { Curves } from "../curves";
import { url } from "../logic/addresses";
import { ago, count, number, shortName } from "../logic/format";
import { orderAfter } from "../logic/orders";
import { failureText, FROM_START, healthClass, healthHint, runName, runOrder, SORTS } from "../logic/runs";
import type { RunOrder, RunSort } from "../logic/runs";
import { headline } from "../logic/series";
import { Choice, Loading, Problem } from "../parts";
import { address, place, remember } from "../router";
import { useRuns } from "../run_list";
import { GroupChoice } from "../run_labels";
import { RunTable } from "../run_table";

// Told apart by readers with colour blindness, and legible on white and on black.
const COLORS = ["#3b7dd8", "#d1602f", "#2e9463", "#9a63d3", "#a8821a", "#1593a5", "#d24b86", "#7b8494"];
const SHOWN_AT_FIRST = 3;
const TYPING_SECONDS = 0.3; // without a letter, before the server is asked
const VIEWS = [
  ["list", "Curves"],
  ["table", "Table"],
] as const;
type ViewName = (typeof VIEWS)[number][0];

export function Runs() {
  const [order, setOrder] = useState(() => runOrder(place.value.query));
  const [view, setView] = useState<ViewName>(place.value.query.get("view") === "table" ? "table" : "list");
  const [by, setBy] = useState(place.value.query.get("by") ?? "");
  const [chosen, setChosen] = useState<string[] | null>(place.value.query.get("runs")?.split(",") ?? null);
  const { runs, more, error, renew } = useRuns(order);
  const known = useRef(new Map<string, Run>()).current; // of all searches
  for (const run of runs ?? []) known.set(run.id, run);
  useEffect(() => {
    if (runs) setChosen((ids) => ids ?? withSteps(runs));
  }, [runs === null]);

  const ask = (change: Partial<RunOrder>) => {
    const next = { ...order, ...change };
    setOrder(next);
    remember({
      search: next.search,
      sort: next.sort === "created" ? "" : next.sort,
      ascending: next.ascending ? "true" : "",
      archived: next.archived ? "true" : "",
    });
  };
  const show = (name: ViewName) => {
    setView(name);
    remember({ view: name === "table" ? name : "" });
  };
  const groupBy = (name: string) => {
    setBy(name);
    remember({ by: name });
  };
  const ids = chosen ?? [];
  const choose = (id: string) => {
    const now = ids.includes(id) ? ids.filter((other) => other !== id) : [...ids, id];
    setChosen(now);
    remember({ runs: now.join() });
  };
  const color = (id: string) => (ids.includes(id) ? COLORS[ids.indexOf(id) % COLORS.length]! : null);
  const label = (id: string) => (known.has(id) ? runName(known.get(id)!) : id);
  const shown = ids.map((id) => ({ id, label: label(id), color: color(id)! }));
  const isTable = view === "table";
  return (
    <div class={isTable ? undefined : "split"}>
      <section class="list" aria-label="Runs">
        <div class="bar">
          <h1>Runs</h1>
          <Search text={order.search} search={(search) => ask({ search })} />
        </div>
        <div class="bar">
          <Choice legend="View" name="view" options={VIEWS} value={view} choose={show} />
          {!isTable && <SortChoice order={order} ask={ask} />}
          {isTable && <GroupChoice runs={runs ?? []} by={by} choose={groupBy} />}
          <label class="check">
            <input
              type="checkbox"
              checked={order.archived}
              onChange={(event) => ask({ archived: event.currentTarget.checked })}
            />{" "}
            Show archived
          </label>
        </div>
        <Problem text={error} />
        {runs?.length === 0 && more === null && <None search={order.search} />}
        {!runs && !error && <Loading />}
        {isTable && runs && runs.length > 0 && (
          <RunTable {...{ runs, order, by, renew }} sortBy={(sort) => ask(orderAfter(order, sort, FROM_START))} />
        )}
        {!isTable && (
          <ul class="runs">
            {runs?.map((run) => (
              <Row key={run.id} run={run} color={color(run.id)} choose={choose} />
            ))}
          </ul>
        )}
        {more && (
          <button type="button" onClick={more}>
            More runs
          </button>
        )}
      </section>
      {!isTable && (
        <Curves
          runs={shown}
          empty={ids.length ? "The chosen runs have no steps yet." : "Choose runs in the list to see their curves."}
        />
      )}
    </div>
  );
}

function withSteps(runs: Run[]): string[] {
  const having = runs.filter((run) => run.steps > 0);
  return having.slice(0, SHOWN_AT_FIRST).map((run) => run.id);
}

function None({ search }: { search: string }) {
  if (search) return <p class="empty">No run has “{search}” in its name, metadata, tags, model or owner.</p>;
  return <p class="empty">There are no runs yet. The first one appears here when a client creates it.</p>;
}

/** Searches when nothing was typed for a moment, or at once with Enter. `/` jumps to it. */
function Search({ text, search }: { text: string; search: (text: string) => void }) {
  const field = useRef<HTMLInputElement>(null);
  const [typed, setTyped] = useState(text);
  useEffect(() => {
    if (typed.trim() === text) return;
    const timer = setTimeout(() => search(typed.trim()), 1000 * TYPING_SECONDS);
    return () => clearTimeout(timer);
  }, [typed, text]);
  useEffect(() => {
    const focus = (event: KeyboardEvent) => {
      if (event.key !== "/" || event.target instanceof HTMLInputElement) return;
      event.preventDefault();
      field.current?.focus();
    };
    addEventListener("keydown", focus);
    return () => removeEventListener("keydown", focus);
  }, []);
  return (
    <input
      ref={field}
      type="search"
      placeholder="Search runs  /"
      aria-label="Search runs"
      maxLength={200}
      value={typed}
      onInput={(event) => setTyped(event.currentTarget.value)}
      onKeyDown={(event) => event.key === "Enter" && search(typed.trim())}
    />
  );
}

function SortChoice({ order, ask }: { order: RunOrder; ask: (change: Partial<RunOrder>) => void }) {
  const sortBy = (sort: RunSort) => ask({ sort, ascending: FROM_START.includes(sort) });
  return (
    <label class="check">
      Sort by
      <select value={order.sort} onChange={(event) => sortBy(event.currentTarget.value as RunSort)}>
        {SORTS.map(([sort, name]) => (
          <option key={sort} value={sort}>
            {name}
          </option>
        ))}
      </select>
    </label>
  );
}

function Row({ run, color, choose }: { run: Run; color: string | null; choose: (id: string) => void }) {
  const best = headline(run);
  return (
    <li class="run">
      <label>
        <input
          type="checkbox"
          checked={color !== null}
          aria-label={`Show curves of ${runName(run)}`}
          onChange={() => choose(run.id)}
        />
        <Swatch color={color} />
      </label>
      <a href={address(url`/runs/${run.id}`)} title={run.id}>
        {runName(run)}
      </a>
      <span class="value">
        {best && (
          <>
            <small>{best[0]}</small> {number(best[1])}
          </>
        )}
      </span>
      <span class="about">
        {caller.value?.needs_key && caller.value.role === "admin" && `${run.owner} · `}
        {shortName(run.base_model)} · rank {run.rank} · {count(run.steps, "step")}
      </span>
      <span class="when">
        <span class={healthClass(run.health)} title={healthHint(run.health)}>
          {run.health.state}
        </span>{" "}
        {ago(run.last_at ?? run.created_at)}
      </span>
      {run.alarms.map((alarm) => (
        <span key={alarm} class="reason alarm">
          {alarm}
        </span>
      ))}
      {(run.health.reason || run.health.failed > 0) && (
        <span class={`reason ${healthClass(run.health)}`} title={failureText(run.health) ?? undefined}>
          {[run.health.failed > 0 && `${count(run.health.failed, "request")} failed`, run.health.reason]
            .filter(Boolean)
            .join("; ")}
        </span>
      )}
    </li>
  );
}
