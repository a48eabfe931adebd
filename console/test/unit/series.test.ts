import assert from "node:assert/strict";
import { test } from "node:test";
import type { MetricsPoint, Run } from "../../src/api_types";
import {
  allNames,
  AUTOMATIC,
  csv,
  firstNames,
  headline,
  isRounding,
  rounded,
  metricTitle,
  smooth,
  smoothingWeight,
  valueAt,
  weightOf,
} from "../../src/logic/series";

test("a run is summed up by its reward, or else by its loss per token", () => {
  const run = (last: Run["last"]) => ({ last }) as Run;
  assert.deepEqual(headline(run({ "reward/b": 2, "reward/a": 1, "loss:sum": 3, "num_tokens:sum": 2 })), [
    "reward/a",
    1,
  ]);
  assert.deepEqual(headline(run({ reward: null })), ["reward", null]);
  assert.deepEqual(headline(run({ "loss:sum": 3, "num_tokens:sum": 2 })), ["loss per token", 1.5]);
  assert.equal(headline(run({ entropy: 1 })), null);
});

test("runs with other metrics have one order of names", () => {
  assert.deepEqual(
    allNames([
      ["reward", "a"],
      ["reward", "kl", "b"],
    ]),
    ["reward", "kl", "b", "a"],
  );
});

test("the first metrics of each run are among the first of all", () => {
  const runs = [
    ["reward", "kl", "a", "b"],
    ["loss", "kl", "c"],
  ];
  assert.deepEqual([...firstNames(runs, 3)], ["reward", "loss", "kl"]);
  assert.deepEqual([...firstNames(runs.slice(0, 1), 12)], runs[0]);
});

test("tiny numbers are rounding, but for rates", () => {
  assert.ok(isRounding("kl:mean", -9e-7));
  assert.deepEqual(
    [-4e-10, 0.5, null].map((value) => rounded("loss", value)),
    [0, 0.5, null],
  );
  assert.ok(!isRounding("kl:mean", 1e-6));
  assert.ok(!isRounding("learning_rate:mean", 1e-9));
  assert.ok(!isRounding("optim/lr", 1e-9));
  assert.ok(!isRounding("kl:mean", null));
});

test("only curves that go up and down are smoothed by themselves", () => {
  const noisy = Array.from({ length: 40 }, (_, i) => i + (i % 2 ? 3 : 0));
  const smoothly = noisy.map((_, i) => i * i);
  assert.deepEqual(
    [weightOf(noisy, null), weightOf(smoothly, null), weightOf(noisy.slice(0, 19), null)],
    [AUTOMATIC, 0, 0],
  );
  assert.deepEqual([weightOf(noisy, 0), weightOf(smoothly, 0.9)], [0, 0.9]);
});

test("smoothing is an average without bias, and keeps gaps", () => {
  assert.deepEqual(smooth([1, 2, 4], 0), [1, 2, 4]);
  assert.deepEqual(smooth([1, null, 2], 0.5), [1, null, 1.25 / 0.75]);
  for (const value of smooth(Array(50).fill(7), 0.9)) assert.ok(Math.abs(value! - 7) < 1e-12);
});

test("a weight that makes no sense is none", () => {
  assert.deepEqual(["0.5", "0.99", "1", "-1", "much", "", null].map(smoothingWeight), [
    0.5,
    0.99,
    null,
    null,
    null,
    null,
    null,
  ]);
  assert.equal(smoothingWeight("0"), 0);
});

test("between two points the older one is shown", () => {
  const values = [null, 1, undefined, null, 5];
  assert.deepEqual(
    values.map((_, index) => valueAt(values, index)),
    [null, 1, 1, 1, 5],
  );
});

test("CSV quotes names, and takes no name for a formula", () => {
  const points: MetricsPoint[] = [
    { seq: 1, step: 0, at: 1.5, metrics: { '=SUM("A")': 1, loss: null } },
    { seq: 2, step: 1, at: 2, metrics: { loss: 0.25 } },
  ];
  const logged = [{ number: 7, step: 9, at: 3, metrics: { loss: 4 } }];
  assert.equal(
    csv([["run-1", points, logged]]),
    [
      `run,step,at,"'=SUM(""A"")",loss,counted by`,
      "run-1,0,1.5,1,,server",
      "run-1,1,2,,0.25,server",
      "run-1,9,3,,4,client",
      "",
    ].join("\n"),
  );
  assert.equal(csv([]), "run,step,at,counted by\n");
});

test("metrics of the server have titles, and those of clients their own names", () => {
  assert.equal(metricTitle("unclipped_grad_l2:mean"), "norm of the gradient");
  for (const name of ["reward/total", "loss per token", "constructor"]) assert.equal(metricTitle(name), null);
});
