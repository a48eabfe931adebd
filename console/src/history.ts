// The curves of runs that are shown, kept up to date.
import { signal } from "@preact/signals";
import { getCurves } from "./api";
import type { CurvesResponse } from "./api_types";
import type { Changed } from "./logic/runs";
import type { View } from "./logic/series";

export class Histories {
  readonly curves = signal<ReadonlyMap<string, CurvesResponse>>(new Map());
  readonly error = signal<string | null>(null);
  #ids: string[] = [];
  #view: View = { axis: "step", zoom: null, names: [] };
  #loading = new Map<string, Promise<void>>();
  #stale = new Set<string>(); // changed while they were being loaded

  /** Shows these runs from now on. */
  async show(ids: string[], view: View): Promise<void> {
    this.#ids = ids;
    this.#view = view;
    await this.refresh("all");
  }

  /** Loads what has changed of the runs that are shown. */
  async refresh(changed: Changed): Promise<void> {
    const stale = this.#ids.filter((id) => changed === "all" || changed.has(id));
    await Promise.all(stale.map((id) => this.#start(id)));
  }

  #start(id: string): Promise<void> {
    const busy = this.#loading.get(id);
    if (busy) {
      this.#stale.add(id);
      return busy;
    }
    const loading = this.#load(id).finally(() => this.#loading.delete(id));
    this.#loading.set(id, loading);
    return loading;
  }

  async #load(id: string): Promise<void> {
    do {
      this.#stale.delete(id);
      try {
        const answer = await getCurves(id, this.#view);
        this.curves.value = new Map(this.curves.value).set(id, answer);
        this.error.value = null;
      } catch (refused) {
        this.error.value = (refused as Error).message;
      }
    } while (this.#stale.has(id));
  }
}
