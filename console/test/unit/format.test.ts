import assert from "node:assert/strict";
import { test } from "node:test";
import {
  ago,
  bytes,
  dateTime,
  decimals,
  duration,
  mark,
  number,
  percent,
  shortName,
  span,
} from "../../src/logic/format";

process.env.TZ = "UTC";

test("numbers are as exact as a reader needs", () => {
  const written: [number | null | undefined, string][] = [
    [null, "–"],
    [undefined, "–"],
    [0, "0"],
    [-3, "−3"],
    [1234567, "1,234,567"],
    [12345.678, "12,346"],
    [-2.34567, "−2.346"],
    [0.001, "0.001000"],
    [0.000123, "1.23e−4"],
    [12345678, "1.23e+7"],
  ];
  for (const [value, text] of written) assert.equal(number(value), text);
});

test("marks of one axis have the same decimals", () => {
  assert.equal(decimals([0, 0.25, 0.5]), 2);
  assert.equal(decimals([0.1 + 0.2, 1]), 1);
  assert.equal(decimals([100, 200]), 0);
  const marks: [number, number, string][] = [
    [0, 2, "0"],
    [0.5, 2, "0.50"],
    [-1, 0, "−1"],
    [0.0005, 4, "5.0e−4"],
    [150000, 0, "1.5e+5"],
    [1, 9, "1.000000"],
    [12500, 1, "12,500.0"],
  ];
  for (const [value, places, text] of marks) assert.equal(mark(value, places), text);
});

test("durations have the largest unit that fits", () => {
  const written: [number, string][] = [
    [0, "0 s"],
    [59, "59 s"],
    [60, "1 min"],
    [90, "1.5 min"],
    [750, "13 min"],
    [3600, "1 h"],
    [9000, "2.5 h"],
    [86400, "1 d"],
    [30 * 86400, "30 d"],
  ];
  for (const [seconds, text] of written) assert.equal(duration(seconds), text);
});

test("short spans are in milliseconds, and never 1000 of them", () => {
  assert.equal(span(0.0123), "12 ms");
  assert.equal(span(0.9994), "999 ms");
  assert.equal(span(0.9996), "1.0 s");
  assert.equal(span(3.44), "3.4 s");
  assert.equal(span(150), "2.5 min");
});

test("what was long ago is told by its age", () => {
  assert.equal(ago(null, 100), "–");
  assert.equal(ago(98, 100), "now");
  assert.equal(ago(130, 100), "now"); // the server's clock may be ahead
  assert.equal(ago(40, 100), "1 min ago");
});

test("sizes have binary units", () => {
  const written: [number, string][] = [
    [0, "0 B"],
    [1023, "1023 B"],
    [1536, "1.5 KiB"],
    [100 * 2 ** 30, "100 GiB"],
    [2 ** 51, "2048 TiB"],
  ];
  for (const [size, text] of written) assert.equal(bytes(size), text);
});

test("parts are in percent, also of nothing", () => {
  assert.equal(percent(1, 3), "33 %");
  assert.equal(percent(0, 0), "0 %");
});

test("times are in the reader's zone, without seconds", () => {
  assert.equal(dateTime(1_790_000_000), "2026-09-21 14:13");
});

test("a model's name is what follows the last slash", () => {
  assert.equal(shortName("Qwen/Qwen3-4B"), "Qwen3-4B");
  assert.equal(shortName("local"), "local");
});
