import assert from "node:assert/strict";
import { test } from "node:test";
import type { LoggedPoint, MetricsPoint, Run } from "../../src/api_types";
import {
  addLogged,
  type ChartPoint,
  chartPoints,
  csv,
  curve,
  headline,
  metricNames,
  smooth,
  smoothingWeight,
  valueAt,
  withDerived,
} from "../../src/logic/series";

function point(step: number, at: number, metrics: ChartPoint["metrics"]): ChartPoint {
  return { step, at, metrics, countedBy: "server" };
}

test("the loss per token and both speeds are derived from sums and times", () => {
  const before: MetricsPoint = { seq: 1, step: 0, at: 100, metrics: {} };
  const metrics = { "loss:sum": 300, "num_tokens:sum": 200, "sampled_tokens:sum": 50 };
  const points: MetricsPoint[] = [
    { seq: 2, step: 1, at: 104, metrics },
    { seq: 3, step: 2, at: 104, metrics }, // no time has passed
  ];
  const [first, second] = withDerived(points, before).map((each) => each.metrics);
  const loss = { ...metrics, "loss per token": 1.5 };
  assert.deepEqual(first, { ...loss, "tokens per second": 50, "sampled tokens per second": 12.5 });
  assert.deepEqual(second, loss);
  assert.deepEqual(withDerived(points.slice(0, 1), undefined)[0]?.metrics, loss);
});

test("a loss without tokens, or one that is not finite, gives no loss per token", () => {
  for (const metrics of [
    { "loss:sum": 1, "num_tokens:sum": 0 },
    { "loss:sum": null, "num_tokens:sum": 8 },
  ]) {
    assert.deepEqual(withDerived([{ seq: 1, step: 0, at: 0, metrics }], undefined)[0]?.metrics, metrics);
  }
});

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

test("metrics that most readers want come first, the others by name", () => {
  const runs = [
    [point(0, 0, { zeta: 1, "learning_rate:mean": 1, alpha: 1 })],
    [point(0, 0, { reward: 1, "kl:mean": 1 })],
  ];
  assert.deepEqual(metricNames(runs), ["reward", "kl:mean", "learning_rate:mean", "alpha", "zeta"]);
});

test("a curve is in the order of its axis, and the newest value of a step counts", () => {
  const points = [
    point(2, 30, { loss: 3 }),
    point(1, 20, { loss: null }),
    point(2, 50, { loss: 4 }),
    point(3, 10, { kl: 1 }),
  ];
  assert.deepEqual(curve(points, "loss", "step"), { x: [1, 2], y: [null, 4] });
  assert.deepEqual(curve(points, "loss", "time"), { x: [10, 20, 40], y: [null, 3, 4] }); // since the first point
  assert.deepEqual(curve(points, "toString", "step"), { x: [], y: [] });
});

test("smoothing is an average without bias, and keeps gaps", () => {
  assert.deepEqual(smooth([1, 2, 4], 0), [1, 2, 4]);
  assert.deepEqual(smooth([1, null, 2], 0.5), [1, null, 1.25 / 0.75]);
  for (const value of smooth(Array(50).fill(7), 0.9)) assert.ok(Math.abs(value! - 7) < 1e-12);
});

test("a weight that makes no sense is none", () => {
  assert.deepEqual(["0.5", "0.99", "1", "-1", "much", "", null].map(smoothingWeight), [0.5, 0.99, 0, 0, 0, 0, 0]);
});

test("between two points the older one is shown", () => {
  const values = [null, 1, undefined, null, 5];
  assert.deepEqual(
    values.map((_, index) => valueAt(values, index)),
    [null, 1, 1, 1, 5],
  );
});

test("what a client sends later adds to its step", () => {
  const byStep = new Map<number, LoggedPoint>();
  addLogged(byStep, [
    { number: 1, step: 5, at: 10, metrics: { reward: 1, kl: 2 } },
    { number: 2, step: 3, at: 11, metrics: { reward: 0 } },
  ]);
  addLogged(byStep, [{ number: 4, step: 5, at: 12, metrics: { kl: 3 } }]);
  const points = chartPoints([{ seq: 9, step: 7, at: 13, metrics: {} }], byStep.values());
  assert.deepEqual(
    points.map(({ step, metrics, countedBy }) => [step, metrics, countedBy]),
    [
      [7, {}, "server"],
      [3, { reward: 0 }, "client"],
      [5, { reward: 1, kl: 3 }, "client"],
    ],
  );
});

test("CSV quotes names, and takes no name for a formula", () => {
  const points = [point(0, 1.5, { '=SUM("A")': 1, loss: null }), point(1, 2, { loss: 0.25 })];
  assert.equal(
    csv([["run-1", points]]),
    [`run,step,at,"'=SUM(""A"")",loss,counted by`, "run-1,0,1.5,1,,server", "run-1,1,2,,0.25,server", ""].join("\n"),
  );
  assert.equal(csv([]), "run,step,at,counted by\n");
});
