import assert from "node:assert/strict";
import { test } from "node:test";
import type { Run } from "../../src/api_types";
import { groupings, runGroups } from "../../src/logic/run_groups";
import { failureText, healthHint, runName } from "../../src/logic/runs";

const run = (id: string, group: string | null, metadata: Record<string, unknown>): Run =>
  ({ id, group, metadata, name: null, display_name: null }) as Run;
const RUNS = [run("a", null, { seed: 1 }), run("b", "sweep", { seed: 2 }), run("c", "sweep", { seed: 1 })];
const named = (by: string) => runGroups(RUNS, by).map(({ name, runs }) => [name, ...runs.map(({ id }) => id)]);

test("runs are grouped by what people or clients say of them", () => {
  assert.deepEqual(groupings(RUNS), [
    ["", "nothing"],
    ["group", "group"],
    ["metadata.seed", "seed"],
  ]);
  assert.deepEqual(named("group"), [
    ["sweep", "b", "c"],
    ["", "a"],
  ]);
  assert.deepEqual(named("metadata.seed"), [
    ["1", "a", "c"],
    ["2", "b"],
  ]);
  assert.deepEqual(named("metadata.group"), [["", "a", "b", "c"]]);
});

test("the name that people have given counts more than the client's", () => {
  const known = run("s:train:1", null, { name: "theirs" });
  assert.equal(runName(known), "theirs");
  assert.equal(runName({ ...known, name: "ours" }), "ours");
});

test("a run says why its last request has failed", () => {
  const failure = { request_id: "r", kind: "forward_backward", category: "user", error: "too long", at: 1 } as const;
  const health = { state: "waiting", reason: null, failed: 1, last_failure: failure } as const;
  assert.equal(failureText(health), "forward backward failed, the request was at fault: too long");
  assert.equal(healthHint(health), "waiting\nforward backward failed, the request was at fault: too long");
  assert.equal(healthHint({ ...health, last_failure: null }), "waiting");
});
