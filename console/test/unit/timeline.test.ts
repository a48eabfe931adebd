import assert from "node:assert/strict";
import { test } from "node:test";
import type { TimedRequest, TimeSlice } from "../../src/api_types";
import { stacked } from "../../src/logic/bars";
import { columns, gaps, lanes, slowest } from "../../src/logic/timeline";

type Stages = TimedRequest["stages"];

const request = (...stages: Stages) => ({ stages });
const from = (begin: number, end: number) => request(["queued", begin, begin], ["device", begin, end]);

test("a request goes into the first lane that is free", () => {
  const [a, b, c, d] = [from(0, 10), from(5, 8), from(8, 12), from(10, 11)] as const;
  assert.deepEqual(lanes([d, c, b, a]), [
    [a, d],
    [b, c],
  ]);
  assert.deepEqual(lanes([]), []);
});

test("gaps are the times without an unfinished request", () => {
  const requests = [from(20, 30), from(5, 10), from(6, 8), from(-5, 2)];
  const window = { since: 0, until: 40, requests };
  assert.deepEqual(gaps({ ...window, is_cut: false }), [
    [2, 5],
    [10, 20],
    [30, 40],
  ]);
  assert.deepEqual(gaps({ ...window, requests: [], is_cut: false }), [[0, 40]]);
});

test("before the first request of a list that was cut, no gap is known", () => {
  const window = { since: 0, until: 40, is_cut: true };
  assert.deepEqual(gaps({ ...window, requests: [from(20, 30)] }), [[30, 40]]);
  assert.deepEqual(gaps({ ...window, requests: [] }), []);
});

test("the slowest requests come first, with the sums of their stages", () => {
  const compiled = request(["queued", 0, 1], ["compiling", 1, 3], ["device", 3, 4], ["compiling", 4, 5]);
  const plain = request(["device", 0, 4]);
  assert.deepEqual(slowest([plain, compiled, from(0, 1)], 2), [
    { request: compiled, seconds: { queued: 1, compiling: 3, device: 1 }, total: 5 },
    { request: plain, seconds: { device: 4 }, total: 4 },
  ]);
});

test("columns stand on each other, and fill their slices", () => {
  const nothing = { device: 0, queue: 0, compile: 0, client: 0, restart: 0, server: 0 };
  const slices: TimeSlice[] = [
    { at: 100, seconds: { ...nothing, device: 1, client: 3 } },
    { at: 104, seconds: { ...nothing, server: 6 } },
  ];
  assert.deepEqual(columns({ since: 100, until: 110, slices }, 50, 80), [
    { cause: "device", x: 0, y: 60, width: 19, height: 20 },
    { cause: "client", x: 0, y: 0, width: 19, height: 60 },
    { cause: "server", x: 20, y: 0, width: 29, height: 80 },
  ]);
});

test("parts of a bar lie side by side, and nothing has no parts", () => {
  assert.deepEqual(stacked([1, 2, 1], 8, 1000), [
    { x: 0, width: 125 },
    { x: 125, width: 250 },
    { x: 375, width: 125 },
  ]);
  assert.deepEqual(stacked([0], 0, 1000), [{ x: 0, width: 0 }]);
});
