// Checkpoints: what their paths say, and what a filter looks at.
import type { Checkpoint } from "../api_types";
import { url } from "./addresses";

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
  const visibility = checkpoint.public ? "public" : "";
  return [tinker_path, checkpoint_type, base_model, JSON.stringify(user_metadata ?? ""), runName, visibility].join(" ");
}

/** A model of the playground: a checkpoint by its name, and the beginning of its run's. */
export function modelName(model: string): string {
  const [run, , ...name] = model.startsWith("tinker://") ? model.slice("tinker://".length).split("/") : [];
  return run && name.length ? `${name.join("/")} · ${run.slice(0, 8)}` : `${model} (base model)`;
}
