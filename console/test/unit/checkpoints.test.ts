import assert from "node:assert/strict";
import { test } from "node:test";
import type { Checkpoint, SavedCheckpoint } from "../../src/api_types";
import { bestOfRun, inOrder } from "../../src/logic/checkpoints";

function saved(name: string, value: number | null, changes: Partial<Checkpoint> = {}): SavedCheckpoint {
  const checkpoint: Checkpoint = {
    checkpoint_id: `sampler_weights/${name}`,
    checkpoint_type: "sampler",
    time: "2026-01-01T00:00:00Z",
    tinker_path: `tinker://run/sampler_weights/${name}`,
    public: false,
    best: false,
    ...changes,
  };
  return { checkpoint, step: null, metric: "reward", value, loss: null };
}

test("checkpoints without a value come last in either order", () => {
  const all = [saved("step 10", null), saved("step 9", 0.5), saved("a", 0.75)];
  const names = (sort: "value" | "name", ascending: boolean) =>
    inOrder(all, { sort, ascending }).map(({ checkpoint }) => checkpoint.checkpoint_id.split("/")[1]);
  assert.deepEqual(names("value", false), ["a", "step 9", "step 10"]);
  assert.deepEqual(names("value", true), ["step 9", "a", "step 10"]);
  assert.deepEqual(names("name", true), ["a", "step 9", "step 10"]);
});

test("a checkpoint is compared with the marked one of its run that can be sampled", () => {
  const best = saved("best", 1, { best: true });
  const other = saved("x", 1, { tinker_path: "tinker://other/sampler_weights/x" });
  assert.equal(bestOfRun([saved("a", 0), best, other], saved("a", 0)), best.checkpoint.tinker_path);
  assert.equal(bestOfRun([best, other], other), null);
  assert.equal(bestOfRun([saved("w", 1, { best: true, checkpoint_type: "training" })], saved("a", 0)), null);
});
