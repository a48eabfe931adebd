// All training runs, and the curves of those that are chosen.
import { useEffect, useRef, useState } from "preact/hooks";
import { caller, getOpenRuns, getRun, listRuns } from "../api";
import type { Run } from "../api_types";
import { Swatch } from "../chart";
import { Curves } from "../curves";
import { poll, watch } from "../live";
import { url } from "../logic/addresses";
import { fits } from "../logic/filters";
import { ago, number, shortName } from "../logic/format";
import { healthClass, healthText, merged, runName, runText, withHealth } from "../logic/runs";
import { headline } from "../logic/series";
import { Loading, Problem } from "../parts";
import { address, place, remember } from "../router";

// Told apart by readers with colour blindness, and legible on white and on black.
const COLORS = ["#3b7dd8", "#d1602f", "#2e9463", "#9a63d3", "#a8821a", "#1593a5", "#d24b86", "#7b8494"];
const SHOWN_AT_FIRST = 3;
const MOST_SINGLY = 5; // runs that are loaded one by one when they change
const HEALTH_SECONDS = 3;

export function Runs() {
  const [runs, setRuns] = useState<Run[] | null>(null);
  const [next, setNext] = useState<number | null>(null);
  const [error, setError] = useState<string | null>(null);
  const [filter, setFilter] = useState("");
  const [chosen, setChosen] = useState<string[] | null>(place.value.query.get("runs")?.split(",") ?? null);
  const field = useRef<HTMLInputElement>(null);

  const load = async (cursor: number | null) => {
    try {
      const page = await listRuns(cursor ?? undefined);
      setRuns((known) => merged(known ?? [], page.runs));
      setNext((old) => (cursor === null && old !== null ? old : page.next_cursor));
      setChosen(
        (ids) =>
          ids ??
          page.runs
            .filter((run) => run.steps)
            .slice(0, SHOWN_AT_FIRST)
            .map((run) => run.id),
      );
      setError(null);
    } catch (refused) {
      setError((refused as Error).message);
    }
  };
  const loadOne = (id: string) =>
    getRun(id).then(
      (run) => setRuns((known) => merged(known ?? [], [run])),
      () => undefined,
    );
  const look = () =>
    getOpenRuns().then(
      (answer) =>
        setRuns((known) => {
          const news = withHealth(known ?? [], answer);
          news.ended.slice(0, MOST_SINGLY).forEach(loadOne);
          return known && news.runs;
        }),
      () => undefined, // what loads the list says why
    );
  const ids = chosen ?? [];
  useEffect(() => void load(null), []);
  useEffect(() => poll(look, HEALTH_SECONDS), []);
  useEffect(
    () =>
      watch((changed) => {
        if (changed === "all" || changed.size > MOST_SINGLY) void load(null);
        else changed.forEach(loadOne);
      }),
    [],
  );
  useEffect(() => {
    const focus = (event: KeyboardEvent) => {
      if (event.key !== "/" || event.target instanceof HTMLInputElement) return;
      event.preventDefault();
      field.current?.focus();
    };
    addEventListener("keydown", focus);
    return () => removeEventListener("keydown", focus);
  }, []);

  const choose = (id: string) => {
    const now = ids.includes(id) ? ids.filter((other) => other !== id) : [...ids, id];
    setChosen(now);
    remember({ runs: now.join() });
  };
  const color = (id: string) => (ids.includes(id) ? COLORS[ids.indexOf(id) % COLORS.length]! : null);
  const known = new Map(runs?.map((run) => [run.id, run]));
  const shown = ids.map((id) => ({
    id,
    label: known.has(id) ? runName(known.get(id)!) : id,
    color: color(id)!,
  }));
  const listed = runs?.filter((run) => fits(filter, runText(run))) ?? [];
  return (
    <div class="split">
      <section class="list" aria-label="Runs">
        <div class="bar">
          <h1>Runs</h1>
          <input
            ref={field}
            type="search"
            placeholder="Filter runs  /"
            aria-label="Filter runs"
            value={filter}
            onInput={(event) => setFilter(event.currentTarget.value)}
          />
        </div>
        <Problem text={error} />
        {runs && runs.length > 0 && listed.length === 0 && (
          <p class="empty">
            {next === null ? "No run" : `None of the newest ${runs.length} runs`} has “{filter}” in its name, metadata,
            model or owner.
          </p>
        )}
        {runs?.length === 0 && (
          <p class="empty">There are no runs yet. The first one appears here when a client creates it.</p>
        )}
        {!runs && !error && <Loading />}
        <ul class="runs">
          {listed.map((run) => (
            <Row key={run.id} run={run} color={color(run.id)} choose={choose} />
          ))}
        </ul>
        {next !== null && (
          <button type="button" onClick={() => load(next)}>
            Older runs
          </button>
        )}
      </section>
      <Curves
        runs={shown}
        empty={ids.length ? "The chosen runs have no steps yet." : "Choose runs in the list to see their curves."}
      />
    </div>
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
        {shortName(run.base_model)} · rank {run.rank} · {number(run.steps)} steps
      </span>
      <span class="when">
        <span class={healthClass(run.health)}>{run.health.state}</span> {ago(run.last_at ?? run.created_at)}
      </span>
      {run.alarms.map((alarm) => (
        <span key={alarm} class="reason alarm">
          {alarm}
        </span>
      ))}
      {(run.health.reason || run.health.failed > 0) && (
        <span class={`reason ${healthClass(run.health)}`} title={healthText(run.health)}>
          {[run.health.failed > 0 && `${number(run.health.failed)} requests have failed`, run.health.reason]
            .filter(Boolean)
            .join("; ")}
        </span>
      )}
    </li>
  );
}
