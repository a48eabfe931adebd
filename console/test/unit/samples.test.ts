import assert from "node:assert/strict";
import { test } from "node:test";
import type { HourOfUse, SampledRequest, SampleOfGroup } from "../../src/api_types";
import { BOUNDS, level, levelNames, likeliest, nats, probability, unlikeliest } from "../../src/logic/logprobs";
import { align, grouped, inOrder, listOrder, weightsName } from "../../src/logic/samples";
import { HOUR, perHour, sum } from "../../src/logic/usage";

test("a token's colour tells how unlikely it was", () => {
  assert.deepEqual([null, 0, -0.1, -0.2, -0.7, -1.5, -3, -9].map(level), [0, 0, 0, 1, 2, 3, 4, 5]);
  assert.equal(levelNames().length, BOUNDS.length + 1);
  assert.deepEqual(levelNames().slice(0, 2), ["above −0.10", "−0.10 to −0.50"]);
  assert.equal(levelNames().at(-1), "below −4.00");
});

test("log-probabilities are in nats and in percent", () => {
  assert.equal(nats(-1.234), "−1.23");
  assert.equal(nats(null), "–");
  assert.equal(probability(0), "100 %");
  assert.equal(probability(Math.log(0.25)), "25 %");
  assert.equal(probability(Math.log(0.00042)), "0.04 %");
});

test("at most five tokens are called unlikely, and only those that are", () => {
  const texts = ["a", "b", "", "d", "e", "f", "g", "h"];
  const logprobs = [-0.5, -2, -99, -7, null, -1.5, -3, -5];
  assert.deepEqual(
    unlikeliest({ texts, logprobs }).map(({ text }) => text),
    ["d", "h", "g", "b", "f"],
  );
  assert.deepEqual(unlikeliest({ texts, logprobs: null }), []);
});

test("samples keep their numbers in every order, and what is not known comes last", () => {
  const samples = [
    { advantage: null, mean_logprob: -1 },
    { advantage: -0.5, mean_logprob: -3 },
    { advantage: 1, mean_logprob: null },
  ] as SampleOfGroup[];
  const numbers = (order: Parameters<typeof inOrder>[1]) => inOrder(samples, order).map(([, number]) => number);
  assert.deepEqual(numbers("drawn"), [1, 2, 3]);
  assert.deepEqual(numbers("advantage"), [3, 2, 1]);
  assert.deepEqual(numbers("likely"), [1, 2, 3]);
});

test("requests of one prompt stand where the first of them is", () => {
  const requests = ["x", "y", "x"].map((group, i) => ({ id: String(i), group }) as SampledRequest);
  assert.deepEqual(
    grouped(requests).map((each) => each.map(({ id }) => id)),
    [["0", "2"], ["1"]],
  );
});

test("weights are named by what they are and how long they were trained", () => {
  assert.equal(weightsName({ weights: null, steps: null }), "base model");
  assert.equal(weightsName({ weights: "version 3", steps: 1 }), "version 3, after 1 step");
  assert.equal(
    weightsName({ weights: "tinker://run/sampler_weights/a", steps: 1200 }),
    "checkpoint a, after 1,200 steps",
  );
});

test("a text is cut into its tokens", () => {
  assert.deepEqual(align("Hello world", ["Hello", " world"]), ["Hello", " world"]);
  assert.deepEqual(align("Hi", ["<bos>", "Hi", "<eos>"]), ["", "Hi", ""]);
});

test("a character of several tokens is the last one's", () => {
  assert.deepEqual(align("a🙂b", ["a", "\ufffd", "\ufffd", "b"]), ["a", "", "🙂", "b"]);
  assert.deepEqual(align("a🙂", ["a", "\ufffd", "\ufffd"]), ["a", "", "🙂"]);
});

test("use is added up by the hour and in all", () => {
  const since = 1_790_002_800;
  const hour = (place: number, owner: string, trained: number): HourOfUse => ({
    hour: since + place * HOUR,
    owner,
    trained,
    forwarded: 1,
    prompt: 0,
    cached: 0,
    sampled: 0,
  });
  const hours = [hour(0, "ada", 5), hour(2, "ada", 7), hour(2, "bob", 1)];
  assert.deepEqual(perHour({ since, until: since + 3 * HOUR - 1 }, hours, "trained"), [5, 0, 8]);
  assert.equal(sum(hours, "trained"), 13);
  assert.equal(sum(hours, "forwarded"), 3);
});

test("a list is in an order that the server knows", () => {
  assert.deepEqual(["highest", "lowest", "newest", "x", null].map(listOrder), [
    "highest",
    "lowest",
    "newest",
    "newest",
    "newest",
  ]);
});

test("the likeliest tokens of a place come first, and the drawn one is among them", () => {
  const known = { " b": -2, "1": -0.5, " drawn": -9 };
  assert.deepEqual(
    likeliest(known).map(({ text }) => text),
    ["1", " b", " drawn"],
  );
  assert.deepEqual(likeliest(null), []);
});
