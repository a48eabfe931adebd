import assert from "node:assert/strict";
import { test } from "node:test";
import type { Checkpoint, Run, RunHealth } from "../../src/api_types";
import { decoded, filled, url } from "../../src/logic/addresses";
import { checkpointText, modelName, pathParts } from "../../src/logic/checkpoints";
import { fits } from "../../src/logic/filters";
import {
  healthClass,
  healthText,
  renewed,
  runName,
  runOrder,
  shortId,
  together,
  withHealth,
  withPage,
} from "../../src/logic/runs";
import { metadataColumns, metadataText } from "../../src/logic/run_metadata";
import { orderAfter } from "../../src/logic/orders";

const RUN: Run = {
  id: "0123456789ab:train:2",
  session_id: "0123456789ab",
  base_model: "Qwen/Qwen3-4B",
  rank: 32,
  owner: "ada",
  created_at: 100,
  is_open: true,
  health: { state: "running", reason: null, failed: 0 },
  metadata: null,
  display_name: null,
  steps: 0,
  last_at: null,
  last: {},
  tags: [],
  alarms: [],
  name: null,
  group: null,
  archived_at: null,
};

test("what is filled into an address is encoded", () => {
  assert.equal(url`/runs/${"a/b?c"}/samples/${7}`, "/runs/a%2Fb%3Fc/samples/7");
  assert.equal(filled("/runs/{run_id}/metrics", { path: { run_id: "a:1/é" } }), "/runs/a%3A1%2F%C3%A9/metrics");
});

test("a query has what is known, also zero and the empty text", () => {
  const query = { limit: 0, search: "", before: null, after: undefined, day: "a&b c" };
  assert.equal(filled("/runs", { query }), "/runs?limit=0&search=&day=a%26b+c");
  assert.equal(filled("/runs", { query: { before: null } }), "/runs");
  assert.equal(filled("/runs"), "/runs");
});

test("a part of an address that is not encoded properly stays", () => {
  assert.equal(decoded("a%2Fb"), "a/b");
  assert.equal(decoded("100%"), "100%");
});

test("a filter wants all its words, in any order", () => {
  assert.ok(fits("", "anything"));
  assert.ok(fits("Rate half ", "half the RATE"));
  assert.ok(!fits("half rate", "half"));
});

test("a run is named by its client, by its session, or by its ID", () => {
  assert.equal(runName({ ...RUN, metadata: { name: "rl" }, display_name: "session" }), "rl");
  assert.equal(runName({ ...RUN, metadata: { name: "", display_name: "shown" } }), shortId(RUN.id));
  assert.equal(runName({ ...RUN, metadata: { display_name: "shown" } }), "shown");
  assert.equal(runName({ ...RUN, metadata: { name: 7 }, display_name: "session" }), "session · 2");
  assert.equal(runName({ ...RUN, id: "0123456789ab:train:0", display_name: "session" }), "session");
  assert.equal(shortId(RUN.id), "01234567…:train:2");
});

test("a run says how it is", () => {
  assert.equal(healthText(RUN.health), "running");
  const silent: RunHealth = { state: "silent", reason: "no heartbeat for 14 s", failed: 0 };
  assert.equal(healthText(silent), "client silent: no heartbeat for 14 s");
  const left: RunHealth = { state: "left", reason: "no heartbeat for 14 s, all steps are saved", failed: 0 };
  assert.equal(healthText(left), "client left: no heartbeat for 14 s, all steps are saved");
  assert.deepEqual([RUN.health, silent, left].map(healthClass), ["good", "bad", "dim"]);
  assert.equal(healthClass({ state: "waiting", reason: "for others", failed: 0 }), "dim");
});

test("newer health replaces the old one, and says which runs have ended", () => {
  const waiting: RunHealth = { state: "waiting", reason: "for others", failed: 1 };
  const [other, old] = [
    { ...RUN, id: "other" },
    { ...RUN, id: "old", is_open: false },
  ];
  const open = { runs: { [RUN.id]: waiting }, is_cut: false };
  const found = withHealth([RUN, other, old], open);
  assert.deepEqual(
    found.runs.map(({ health }) => health.state),
    ["waiting", "running", "running"],
  );
  assert.deepEqual(found.ended, ["other"]);
  assert.deepEqual(withHealth([RUN, other, old], { ...open, is_cut: true }).ended, []);
});

test("the first page of a list may have new runs, and others go on behind the last one", () => {
  const [a, b, c] = ["a", "b", "c"].map((id) => ({ ...RUN, id })) as [Run, Run, Run];
  const renewedA = { ...a, steps: 5 };
  assert.deepEqual(withPage([a, b], [c, renewedA], true), [c, renewedA, b]);
  assert.deepEqual(withPage([a, b], [renewedA, c], false), [renewedA, b, c]);
  assert.deepEqual(renewed([a, b], renewedA), [renewedA, b]);
  assert.deepEqual(renewed([b], renewedA), [b]);
});

test("an address says how runs are ordered, and one of nonsense says nothing", () => {
  const order = (text: string) => runOrder(new URLSearchParams(text));
  assert.deepEqual(order("search=half+rate&sort=rank&ascending=true&archived=true"), {
    search: "half rate",
    sort: "rank",
    ascending: true,
    archived: true,
  });
  const usual = { search: "", sort: "created", ascending: false, archived: false };
  assert.deepEqual(order("sort=colour&ascending=1&archived=1"), usual);
});

test("a click on a head turns the direction, or begins at a column's most telling end", () => {
  const byRank = { sort: "rank", ascending: false };
  assert.deepEqual(orderAfter(byRank, "rank", ["model"]), { sort: "rank", ascending: true });
  assert.deepEqual(orderAfter(byRank, "model", ["model"]), { sort: "model", ascending: true });
  assert.deepEqual(orderAfter(byRank, "created", ["model"]), { sort: "created", ascending: false });
});

test("metadata that most runs have becomes columns", () => {
  const run = (metadata: Run["metadata"]): Run => ({ ...RUN, metadata });
  const rated = run({ name: "a", optimizer: { rate: 0.5, betas: [0.9, 0.95] }, task: "sums" });
  assert.deepEqual(metadataColumns([run({ task: "words" }), rated, run(null)]), [
    "task",
    "optimizer.rate",
    "optimizer.betas",
  ]);
  const many = Object.fromEntries(Array.from({ length: 20 }, (_, number) => [`key ${number}`, number]));
  const columns = metadataColumns([run({ ...many, last: 1 }), run({ last: 2 })]);
  assert.equal(columns.length, 8);
  assert.equal(columns.at(-1), "last");
  assert.equal(metadataText(rated, "optimizer.betas"), "[0.9,0.95]");
  assert.equal(metadataText(rated, "task"), "sums");
  assert.equal(metadataText(run({ flag: false, nothing: null }), "flag"), "false");
  assert.equal(metadataText(run({ nothing: null }), "nothing"), "null");
  assert.equal(metadataText(rated, "missing"), "");
  assert.equal(metadataText(run({ note: "x".repeat(100) }), "note").length, 61);
});

test("changes of both are all changes", () => {
  assert.deepEqual(together(new Set(["a"]), new Set(["b", "a"])), new Set(["a", "b"]));
  assert.equal(together("all", new Set(["b"])), "all");
  assert.equal(together(new Set(), "all"), "all");
});

test("the path of a checkpoint tells its run, its route and its name", () => {
  assert.deepEqual(pathParts("tinker://run:1/weights/step 10/final"), {
    run: "run:1",
    name: "step 10/final",
    route: "/api/v1/training_runs/run%3A1/checkpoints/weights/step%2010%2Ffinal",
  });
});

test("a filter of checkpoints sees the name of the run, and whether all may read it", () => {
  const checkpoint: Checkpoint = {
    checkpoint_id: "weights/a",
    checkpoint_type: "training",
    time: "2026-01-01T00:00:00Z",
    tinker_path: "tinker://run-1/weights/a",
    public: true,
    best: false,
    user_metadata: { task: "sums" },
  };
  const text = checkpointText(checkpoint, new Map([["run-1", "Arithmetic"]]));
  assert.ok(fits("public arithmetic sums training", text));
  assert.ok(!fits("public", checkpointText({ ...checkpoint, public: false }, new Map())));
  assert.ok(fits("best", checkpointText({ ...checkpoint, best: true }, new Map())));
});

test("a model of the playground is a checkpoint or the base model", () => {
  assert.equal(modelName("tinker://0123456789ab/sampler_weights/step/10"), "step/10 · 01234567");
  assert.equal(modelName("Qwen/Qwen3-4B"), "Qwen/Qwen3-4B (base model)");
  const path = "tinker://0123456789ab/sampler_weights/a";
  assert.equal(modelName(path, new Set([path])), "★ best: a · 01234567");
});
