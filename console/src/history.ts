// The points of runs that are shown, kept up to date.
import { signal } from "@preact/signals";
import { metricPages } from "./api";
import type { LoggedPoint, MetricsPoint } from "./api_types";
import type { Changed } from "./logic/runs";
import { addLogged, chartPoints, withDerived, type ChartPoint } from "./logic/series";

/** What is known of one run. */
interface History {
  points: MetricsPoint[]; // of the server's steps
  logged: Map<number, LoggedPoint>; // by the client's step
  loggedAfter: number | undefined; // number of the last one that has come
}

export class Histories {
  readonly points = signal<ReadonlyMap<string, ChartPoint[]>>(new Map());
  readonly error = signal<string | null>(null);
  #known = new Map<string, History>();
  #loading = new Map<string, Promise<void>>();

  /** Loads what is new of these runs; one that is being loaded is left alone until it is there. */
  async refresh(ids: string[], changed: Changed = "all"): Promise<void> {
    const stale = ids.filter((id) => changed === "all" || changed.has(id));
    await Promise.all(stale.map((id) => this.#loading.get(id) ?? this.#start(id)));
  }

  #start(id: string): Promise<void> {
    const loading = this.#load(id)
      .then(
        () => this.#report(null),
        (refused: Error) => this.#report(refused.message),
      )
      .finally(() => this.#loading.delete(id));
    this.#loading.set(id, loading);
    return loading;
  }

  #report(error: string | null): void {
    this.error.value = error;
  }

  async #load(id: string): Promise<void> {
    const known: History = this.#known.get(id) ?? { points: [], logged: new Map(), loggedAfter: undefined };
    this.#known.set(id, known);
    for await (const { points, logged } of metricPages(id, known.points.at(-1)?.seq, known.loggedAfter)) {
      known.points.push(...withDerived(points, known.points.at(-1)));
      addLogged(known.logged, logged);
      known.loggedAfter = logged.at(-1)?.number ?? known.loggedAfter;
      this.points.value = new Map(this.points.value).set(id, chartPoints(known.points, known.logged.values()));
    }
  }
}
