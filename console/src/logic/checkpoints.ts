// Checkpoints: what their paths say, and what a filter looks at.
import type { Checkpoint, SavedCheckpoint } from "../api_types";
import { url } from "./addresses";
import type { Order } from "./orders";

export type CheckpointSort = "name" | "step" | "value" | "loss" | "size" | "saved";

export const NEWEST_FIRST: Order<CheckpointSort> = { sort: "saved", ascending: false };

const KEYS: Record<CheckpointSort, (saved: SavedCheckpoint) => string | number | null> = {
  name: ({ checkpoint }) => pathParts(checkpoint.tinker_path).name,
  step: ({ step }) => step,
  value: ({ value }) => value,
  loss: ({ loss }) => loss,
  size: ({ checkpoint }) => checkpoint.size_bytes ?? null,
  saved: ({ checkpoint }) => Date.parse(checkpoint.time),
};

/** Sorts checkpoints; those without a value come last in either order. */
export function inOrder(saved: SavedCheckpoint[], { sort, ascending }: Order<CheckpointSort>): SavedCheckpoint[] {
  const key = KEYS[sort];
  const compare = (one: SavedCheckpoint, other: SavedCheckpoint) => {
    const [a, b] = [key(one), key(other)];
    if (a === null || b === null) return Number(a === null) - Number(b === null);
    const difference = typeof a === "string" ? a.localeCompare(String(b), undefined, { numeric: true }) : a - Number(b);
    return ascending ? difference : -difference;
  };
  return [...saved].sort(compare);
}

/** The path of the marked checkpoint of the same run, if it can be sampled. */
export function bestOfRun(saved: SavedCheckpoint[], { checkpoint }: SavedCheckpoint): string | null {
  const { run } = pathParts(checkpoint.tinker_path);
  const isIt = ({ best, checkpoint_type, tinker_path }: Checkpoint) =>
    best && checkpoint_type === "sampler" && pathParts(tinker_path).run === run;
  return saved.find((each) => isIt(each.checkpoint))?.checkpoint.tinker_path ?? null;
}

/** Reads tinker://RUN/KIND/NAME: the run, the route of the checkpoint, and its name. */
export function pathParts(tinkerPath: string): { run: string; route: string; name: string } {
  const [run = "", kind = "", ...rest] = tinkerPath.replace("tinker://", "").split("/");
  const name = rest.join("/");
  return { run, name, route: url`/api/v1/training_runs/${run}/checkpoints/${kind}/${name}` };
}

/** What a filter looks at. `runNames`: by ID. */
export function checkpointText(checkpoint: Checkpoint, runNames: ReadonlyMap<string, string>): string {
  const { tinker_path, checkpoint_type, base_model, user_metadata } = checkpoint;
  const runName = runNames.get(pathParts(tinker_path).run);
  const visibility = `${checkpoint.public ? "public" : ""} ${checkpoint.best ? "best" : ""}`;
  return [tinker_path, checkpoint_type, base_model, JSON.stringify(user_metadata ?? ""), runName, visibility].join(" ");
}

/** A model of the playground: a checkpoint by its name, and the beginning of its run's; the best ones are marked. */
export function modelName(model: string, best: ReadonlySet<string> = new Set()): string {
  const [run, , ...name] = model.startsWith("tinker://") ? model.slice("tinker://".length).split("/") : [];
  const mark = best.has(model) ? "★ best: " : "";
  return run && name.length ? `${mark}${name.join("/")} · ${run.slice(0, 8)}` : `${model} (base model)`;
}
