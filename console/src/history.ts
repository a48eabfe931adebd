// The points of runs that are shown, kept up to date.
import { signal } from "@preact/signals";
import { metricPages, type Point } from "./api";
import type { Changed } from "./live";
import { withDerived } from "./series";

export class Histories {
  readonly points = signal<ReadonlyMap<string, Point[]>>(new Map());
  readonly error = signal<string | null>(null);
  #loading = new Map<string, Promise<void>>();

  /** Loads what is new of these runs; one that is being loaded is left alone until it is there. */
  async refresh(ids: string[], changed: Changed = "all"): Promise<void> {
    const stale = ids.filter((id) => changed === "all" || changed.has(id));
    await Promise.all(stale.map(async (id) => {
      const step = changed === "all" ? null : changed.get(id);
      if (step == null) return this.#loading.get(id) ?? this.#start(id);
      while (this.#loading.has(id)) await this.#loading.get(id);
      this.#forget(id, step);
      return this.#start(id);
    }));
  }

  /** Drops the points from a step on, which a client has added to. */
  #forget(id: string, step: number): void {
    const known = this.points.value.get(id) ?? [];
    const kept = known.filter((point) => point.step < step);
    if (kept.length < known.length) this.points.value = new Map(this.points.value).set(id, kept);
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
    for await (const page of metricPages(id, this.points.value.get(id)?.at(-1)?.seq ?? null)) {
      const known = this.points.value.get(id) ?? [];
      const fresh = withDerived(page, known.at(-1));
      this.points.value = new Map(this.points.value).set(id, [...known, ...fresh]);
    }
  }
}
