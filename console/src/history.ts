// The points of runs that are shown, kept up to date.
import { signal } from "@preact/signals";
import { metricPages, type Logged, type Point } from "./api";
import type { Changed } from "./live";
import { withDerived, type Shown } from "./series";

/** What is known of one run. */
interface History {
  points: Point[]; // of the server's steps
  logged: Map<number, Logged>; // by the client's step
  loggedAfter: number | null; // number of the last one that has come
}

export class Histories {
  readonly points = signal<ReadonlyMap<string, Shown[]>>(new Map());
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
      .then(() => void (this.error.value = null))
      .catch((error: Error) => void (this.error.value = error.message))
      .finally(() => this.#loading.delete(id));
    this.#loading.set(id, loading);
    return loading;
  }

  async #load(id: string): Promise<void> {
    const known: History = this.#known.get(id) ?? { points: [], logged: new Map(), loggedAfter: null };
    this.#known.set(id, known);
    for await (const { points, logged } of metricPages(id, known.points.at(-1)?.seq ?? null, known.loggedAfter)) {
      known.points.push(...withDerived(points, known.points.at(-1)));
      for (const each of logged) {
        const before = known.logged.get(each.step);
        known.logged.set(each.step, before ? { ...before, metrics: { ...before.metrics, ...each.metrics } } : each);
        known.loggedAfter = each.number;
      }
      this.points.value = new Map(this.points.value).set(id, shown(known));
    }
  }
}

/** The server's steps, then the client's, each in their order. */
function shown({ points, logged }: History): Shown[] {
  const ofClient = [...logged.values()].sort((a, b) => a.step - b.step);
  return [...points.map((point) => ({ ...point, countedBy: "server" as const })), ...ofClient.map((each) => ({ ...each, countedBy: "client" as const }))];
}
