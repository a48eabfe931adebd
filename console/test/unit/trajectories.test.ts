import assert from "node:assert/strict";
import { test } from "node:test";
import type { TrajectoryEntry, TurnEntry } from "../../src/api_types";
import { graph, MOST_LANES, width } from "../../src/logic/lanes";
import { cachedShare, cut, filledIn, modelName, shownTokens, unread, why } from "../../src/logic/trajectories";

const turns = (...parents: [string, string | null][]) => parents.map(([id, parent]) => ({ id, parent }));
const turn = (id: string, more: Partial<TurnEntry> = {}) => ({ id, state: "sampled", ...more }) as TurnEntry;

test("turns that go on from each other stay in one lane", () => {
  const rows = graph(turns(["a", null], ["b", "a"], ["c", "b"]));
  assert.deepEqual(
    rows.map(({ lane, arms }) => [lane, arms.length]),
    [
      [0, 0],
      [0, 0],
      [0, 0],
    ],
  );
  assert.deepEqual(
    rows.map(({ lines }) => lines.map(({ from, to }) => `${from} ${to}`)),
    [["here below"], ["above below"], ["above here"]],
  );
  assert.equal(width(rows), 1);
});

test("a branch has a lane that begins at the turn it goes on from", () => {
  const rows = graph(turns(["a", null], ["b", "a"], ["c", "a"], ["d", "b"]));
  assert.deepEqual(
    rows.map(({ lane }) => lane),
    [0, 0, 1, 0],
  );
  assert.deepEqual(rows[0]!.arms, [{ lane: 1, color: 0 }]);
  assert.deepEqual(
    rows.map(({ lines }) => lines.find(({ lane }) => lane === 1)?.to),
    ["below", "below", "here", undefined],
  );
});

test("other roots have other colours, and free lanes are used again", () => {
  const rows = graph(turns(["a", null], ["x", null], ["b", "a"], ["c", "b"], ["y", null]));
  assert.deepEqual(
    rows.map(({ lane, color }) => [lane, color]),
    [
      [0, 0],
      [1, 1],
      [0, 0],
      [0, 0],
      [0, 2],
    ],
  );
  assert.ok(rows[1]!.lines.every(({ lane }) => lane === 0)); // a turn alone has no line
});

test("a thousand branches stay within so many lanes", () => {
  const rows = graph(turns(["a", null], ...Array.from({ length: 1023 }, (_, i) => [`b${i}`, "a"] as [string, string])));
  assert.equal(width(rows), MOST_LANES);
  assert.ok(rows.every(({ lines, arms }) => lines.length < MOST_LANES && arms.length < MOST_LANES));
});

test("a turn whose parent is not there is a root", () => {
  assert.deepEqual(graph(turns(["b", "gone"]))[0]!.arms, []);
});

test("each place in the tree has its reason", () => {
  assert.equal(why({ cause: "continues", cause_message: null }), null);
  assert.equal(why({ cause: "edited", cause_message: 7 }), "message 7 was edited");
  assert.equal(why({ cause: "retry", cause_message: null }), "the same messages again");
  assert.equal(why({ cause: "of a later version", cause_message: null }), "of a later version");
});

test("a table names model and checkpoint, and the share that was cached", () => {
  assert.equal(modelName({ model: "Qwen/Qwen3-4B", weights: null }), "Qwen3-4B");
  assert.equal(modelName({ model: "Qwen/Qwen3-4B", weights: "tinker://r/sampler_weights/v 3" }), "Qwen3-4B · v 3");
  const path = "tinker://r/sampler_weights/v3";
  assert.equal(modelName({ model: path, weights: path }), "v3");
  assert.equal(modelName({ model: null, weights: null }), "–");
  assert.equal(cachedShare({ cached_tokens: 30, prompt_tokens: 40 } as TrajectoryEntry), "75 %");
  assert.equal(cachedShare({ cached_tokens: 0, prompt_tokens: 0 } as TrajectoryEntry), "–");
});

test("turns that were read stand where the outline has them, with the newest reward", () => {
  const outline = [turn("a:0"), turn("b:0", { reward: 1 }), turn("b:2"), turn("c:0")];
  const read = new Map([["b", [turn("b:0"), turn("b:1"), turn("b:2")]]]);
  const shown = filledIn(outline, read);
  assert.deepEqual(
    shown.map(({ id }) => id),
    ["a:0", "b:0", "b:1", "b:2", "c:0"],
  );
  assert.equal(shown[1]!.reward, 1);
});

test("open turns are read once, and again when they have ended", () => {
  const outline = [turn("a:0"), turn("b:0"), turn("b:1"), turn("c:0")];
  const open = new Set(["a", "b"]);
  assert.deepEqual(unread(outline, open, new Map(), 8), ["a", "b"]);
  assert.deepEqual(unread(outline, open, new Map(), 1), ["a"]);
  const read = new Map([
    ["a", [turn("a:0")]],
    ["b", [turn("b:0", { state: "open" })]],
  ]);
  assert.deepEqual(unread(outline, open, read, 8), ["b"]);
});

test("long texts are cut, and long samples in their middle", () => {
  assert.deepEqual(cut("abcd", 4), { text: "abcd", left: 0 });
  assert.deepEqual(cut("abcde", 2), { text: "ab", left: 3 });
  const texts = [..."abcdefgh"];
  const forced = texts.map((text) => text === "b");
  const sampled = { tokens: texts, logprobs: texts.map((_, i) => -i), forced };
  const shown = shownTokens(sampled, 2, 1);
  assert.deepEqual(shown.texts, ["a", "b", "h"]);
  assert.deepEqual(shown.logprobs, [-0, -1, -7]);
  assert.deepEqual(shown.forced, [false, true, false]);
  assert.deepEqual([shown.left_out, shown.left_out_at], [5, 2]);
  assert.equal(shownTokens({}, 8, 1).left_out, 0);
});
