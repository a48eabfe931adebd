import assert from "node:assert/strict";
import { beforeEach, test } from "node:test";
import { get, metricPages, mustSignIn, Refused, signIn } from "../../src/api";
import { Histories } from "../../src/history";
import { extended, stream } from "../../src/openai";

let asked: string[] = [];

/** Answers one request after the other, each with a status and a body. */
function answerWith(...answers: [number, unknown][]): void {
  asked = [];
  globalThis.fetch = async (address) => {
    asked.push(String(address));
    const [status, body] = answers.shift()!;
    return new Response(typeof body === "string" ? body : JSON.stringify(body), { status });
  };
}

beforeEach(() => {
  mustSignIn.value = false;
});

const point = (seq: number) => ({ seq, step: seq - 1, at: 10 * seq, metrics: {} });

test("a refusal says what the server said", async () => {
  for (const body of [{ error: { message: "no" } }, { error: "no" }, { detail: "no" }]) {
    answerWith([403, body]);
    await assert.rejects(get("/console/api/server"), { status: 403, message: "no" });
  }
  answerWith([502, "<html>"]);
  await assert.rejects(get("/console/api/server"), { message: "the server answered 502" });
  assert.equal(mustSignIn.value, false);
});

test("a key that the server does not know asks for another", async () => {
  answerWith([401, { error: "unknown key" }]);
  await assert.rejects(get("/console/api/runs"), Refused);
  assert.equal(mustSignIn.value, true);
});

test("without cookies the key is sent with each request, once the server takes it", async () => {
  answerWith([405, {}], [200, { runs: [] }]);
  await signIn("tml-key");
  assert.deepEqual(asked, ["/console/api/session", "/console/api/runs?limit=1"]);
});

test("a busy server is asked again, at most three times", async (context) => {
  context.mock.timers.enable({ apis: ["setTimeout"] });
  answerWith([429, {}], [429, {}], [429, {}], [429, {}]);
  const answer = assert.rejects(get("/console/api/keys"), { status: 429 });
  for (let i = 0; i < 3; i++) {
    while (asked.length <= i) await new Promise(setImmediate);
    await new Promise(setImmediate);
    context.mock.timers.tick(2000);
  }
  await answer;
  assert.equal(asked.length, 4);
});

test("metrics are read page by page, behind what is known", async () => {
  const logged = [{ number: 8, step: 0, at: 1, metrics: { reward: 1 } }];
  answerWith(
    [200, { points: [point(4), point(6)], next_after: 6 }],
    [200, { points: [], next_after: null, logged, next_logged_after: 8 }],
    [200, { points: [], next_after: null }],
  );
  const pages = [];
  for await (const page of metricPages("a:1", 3, 7)) pages.push(page);
  assert.deepEqual(pages, [
    { points: [point(4), point(6)], logged: [] },
    { points: [], logged },
  ]);
  assert.deepEqual(asked, [
    "/console/api/runs/a%3A1/metrics?limit=5000&after=3&logged_after=7",
    "/console/api/runs/a%3A1/metrics?limit=5000&after=6&logged_after=7",
    "/console/api/runs/a%3A1/metrics?limit=5000&after=6&logged_after=8",
  ]);
});

test("a history asks for what has changed, and keeps what it has when the server fails", async () => {
  const histories = new Histories();
  const known = { names: ["reward"], curves: [] };
  answerWith([200, known], [200, known]);
  await histories.show(["a", "b"], { axis: "time", zoom: [1, 2.5], names: ["x&y", "z"] });
  const query = "axis=time&first=1&last=2.5&name=x%26y&name=z";
  assert.deepEqual(asked, [`/console/api/runs/a/curves?${query}`, `/console/api/runs/b/curves?${query}`]);
  answerWith([500, {}]);
  await histories.refresh(new Set(["b", "c"]));
  assert.deepEqual(asked, [`/console/api/runs/b/curves?${query}`]);
  assert.equal(histories.error.value, "the server answered 500");
  assert.deepEqual(histories.curves.value.get("b"), known);
  answerWith([200, { names: [], curves: [] }]);
  await histories.refresh(new Set(["b"]));
  assert.equal(histories.error.value, null);
});

const SETTINGS = { model: "m", temperature: 1, top_p: 1, max_tokens: 8, n: 1, seed: null };

async function streamed(prompt: Parameters<typeof stream>[0], body: string) {
  answerWith([200, body]);
  const deltas = [];
  for await (const delta of stream(prompt, SETTINGS, new AbortController().signal)) deltas.push(delta);
  return deltas;
}

test("completions and conversations give the same pieces", async () => {
  const completion = {
    index: 0,
    text: "Hi",
    finish_reason: null,
    logprobs: { tokens: ["Hi"], token_logprobs: [-0.5] },
  };
  const chat = {
    index: 0,
    delta: { content: "Hi" },
    finish_reason: "stop",
    logprobs: { content: [{ token: "Hi", logprob: -1 }] },
  };
  const last = { index: 1, delta: {}, finish_reason: "length", logprobs: null };
  const lines = (...choices: object[]) =>
    choices.map((each) => `data: ${JSON.stringify({ choices: [each] })}\n\n`).join("");
  assert.deepEqual(await streamed("prompt", `: alive\n\n${lines(completion)}data: [DONE]\n\n`), [
    { index: 0, text: "Hi", tokens: ["Hi"], logprobs: [-0.5], finish: null },
  ]);
  assert.deepEqual(asked, ["/oai/api/v1/completions"]);
  assert.deepEqual(await streamed([{ role: "user", content: "?" }], lines(chat, last)), [
    { index: 0, text: "Hi", tokens: ["Hi"], logprobs: [-1], finish: "stop" },
    { index: 1, text: "", tokens: [], logprobs: [], finish: "length" },
  ]);
  assert.deepEqual(asked, ["/oai/api/v1/chat/completions"]);
});

test("an event may come in pieces, and an error ends the stream", async () => {
  const bytes = new TextEncoder().encode(
    'data: {"choices":[{"index":0,"text":"é","finish_reason":null,"logprobs":null}]}\n\n',
  );
  const body = new ReadableStream({
    start(controller) {
      for (const byte of bytes) controller.enqueue(Uint8Array.of(byte));
      controller.close();
    },
  });
  globalThis.fetch = async () => new Response(body);
  const texts = [];
  for await (const { text } of stream("p", SETTINGS, new AbortController().signal)) texts.push(text);
  assert.deepEqual(texts, ["é"]);
  await assert.rejects(streamed("p", 'data: {"error":{"message":"out of memory"}}\n\n'), { message: "out of memory" });
});

test("an answer grows by what comes, and keeps why it ended", () => {
  const empty = { text: "", tokens: [], logprobs: [], finish: null };
  const first = extended(empty, { index: 0, text: "a", tokens: ["a"], logprobs: [-1], finish: "stop" });
  const second = extended(first, { index: 0, text: "b", tokens: ["b"], logprobs: [-2], finish: null });
  assert.deepEqual(second, { text: "ab", tokens: ["a", "b"], logprobs: [-1, -2], finish: "stop" });
});
