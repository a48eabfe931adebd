// Drives one page in Chromium: node test/drive.mjs STORY ADDRESS CHROMIUM [FACTS].
// FACTS are what a story must know, as JSON.
// A line on standard output says that something may happen to the server now. With SCREENSHOTS=DIR it keeps pictures.
import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import { createRequire } from "node:module";
import { join } from "node:path";
import { chromium } from "playwright-core";
import { liveStories } from "./live.mjs";

const [story, address, executablePath, text] = process.argv.slice(2);
const facts = JSON.parse(text ?? "{}");
const axe = readFileSync(createRequire(import.meta.url).resolve("axe-core/axe.min.js"), "utf8");
const needsKey = ["sign_in", "no_rights"].includes(story) || "key" in facts;
const isAllowed = (text) => needsKey && /status of 40[0134]/.test(text); // the browser tells of each refused key

const STORIES = {
  async runs(page) {
    await page.goto(`${address}/console`);
    await page.locator(".run").nth(4).waitFor();
    await page.locator(".chart").first().waitFor();
    assert.equal(await page.locator(".run input:checked").count(), 3);
    assert.equal(await page.locator(".chart .name").first().textContent(), "reward");
    await page.locator(".chart", { hasText: "loss per token" }).locator(".values li").nth(2).waitFor();
    const newest = await page.locator(".chart").first().locator(".values li").first().textContent();
    await page.locator(".run").nth(0).getByText(`reward ${newest}`).waitFor(); // raw, although the curve is smoothed
    await page.locator(".run").nth(0).getByText("3 requests failed; no heartbeat for 14 s").waitFor();
    await page.locator(".run").nth(1).getByText("KeyError: 'reward'").waitFor();
    await page.locator(".run").nth(1).getByText("the gradient's norm, 52, is 68 times as large as usual").waitFor();
    await look(page, "runs");
    const chart = await page.locator(".chart .u-over").first().boundingBox();
    await page.mouse.move(chart.x + 0.25 * chart.width, chart.y + 20);
    await page.mouse.down();
    await page.mouse.move(chart.x + 0.5 * chart.width, chart.y + 20, { steps: 4 });
    await page.mouse.up();
    await page.getByRole("button", { name: "Whole run" }).click();
    await page.getByRole("button", { name: "Whole run" }).waitFor({ state: "detached" });
    await page.getByLabel("Smoothing").fill("0.9");
    await page.getByText("time", { exact: true }).click();
    await page.waitForURL(/x=time/);
    await page.waitForURL(/smoothing=0.9/);
    await page.locator(".run input").first().click();
    assert.equal(await page.locator(".chart").first().locator(".values li").count(), 2);
    const saving = page.waitForEvent("download");
    await page.getByRole("button", { name: "Export CSV" }).click();
    const rows = readFileSync(await (await saving).path(), "utf8")
      .trim()
      .split("\n");
    assert.equal(rows.length, 1 + 2 * 400);
    assert.match(rows[0], /^run,step,at,.*,loss:sum,num_tokens:sum,reward,/);
    assert.ok(rows[0].includes(`,"'=HYPERLINK(""http://other.site"")",`)); // no formula in a spreadsheet
    await page.keyboard.press("Escape");
    await page.locator("body").press("/");
    await page.keyboard.type("odd &");
    await page.waitForURL(/search=odd/);
    await page.waitForFunction(() => document.querySelectorAll(".run").length === 1);
    assert.equal(await page.locator(".run a").textContent(), "<b>odd & name</b>");
    assert.equal(await page.locator(".chart").first().locator(".values li").count(), 2); // the chosen runs stay
    await page.getByLabel("Search runs").fill("nowhere");
    await page.getByText("No run has “nowhere” in its name").waitFor();
    await page.getByLabel("Search runs").fill("");
    await page.getByLabel("Sort by").selectOption("Base model");
    await page.waitForURL(/sort=model&ascending=true/);
    await page.waitForFunction(() => document.querySelector(".run a")?.textContent === "arithmetic rl");
    await page.reload();
    await page.locator(".chart").first().waitFor();
    assert.equal(await page.locator(".run input:checked").count(), 2);
    assert.equal(await page.getByLabel("Smoothing").inputValue(), "0.9");
  },
  async table(page) {
    await page.goto(`${address}/console`);
    await page.getByText("Table", { exact: true }).click();
    await page.waitForURL(/view=table/);
    const heads = page.locator(".run-table thead th");
    await page.getByRole("row", { name: /arithmetic rl silent 400 reward/ }).waitFor();
    assert.deepEqual(await heads.allTextContents(), [
      "Name",
      "State",
      "Steps",
      "Newest value",
      "Group",
      "Base model",
      "Rank",
      "optimizer.learning_rate",
      "Created ↓",
      "Last changed",
    ]);
    await look(page, "table");
    await page.getByRole("button", { name: "Created" }).click();
    await page.waitForURL(/ascending=true/);
    await page.waitForFunction(() => document.querySelector(".run-table tbody a")?.textContent === "<b>odd & name</b>");
    assert.equal(await heads.nth(8).getAttribute("aria-sort"), "ascending");
    await page.reload();
    await page.getByLabel("Search runs").fill("gpt-oss");
    await page.waitForFunction(() => document.querySelectorAll(".run-table tbody tr").length === 2);
    await page.getByLabel("Search runs").fill("");
    await page.getByLabel("Group by").selectOption("group");
    await page.waitForURL(/by=group/);
    await page.waitForFunction(() => document.querySelectorAll(".run-table tbody").length === 2);
    assert.deepEqual(await page.locator(".group-head").allTextContents(), ["sweep of rates 2", "no group 3"]);
    await page.getByLabel("Mark sft on capitals").check();
    await page.getByLabel("Mark distillation").check();
    await page.getByText("2 runs are marked").waitFor();
    await page.getByRole("textbox", { name: "Group" }).fill("supervised");
    await page.getByRole("button", { name: "Set the group" }).click();
    await page.locator(".group-head", { hasText: "supervised 2" }).waitFor();
    await look(page, "table_groups");
    await page.getByLabel("Mark sft on capitals").uncheck();
    await page.getByRole("button", { name: "Archive" }).click();
    await page.getByLabel("Mark distillation").waitFor({ state: "detached" });
    await page.getByLabel("Show archived").check();
    await page.waitForURL(/archived=true/);
    await page.getByRole("row", { name: /distillation archived/ }).waitFor();
    await page.reload();
    await page.getByRole("row", { name: /distillation archived/ }).waitFor();
    await page.setViewportSize({ width: 390, height: 800 });
    assert.equal(await page.evaluate(() => document.documentElement.scrollWidth), 390);
    await look(page, "phone_table");
    await page.getByRole("link", { name: "distillation" }).click();
    await page.locator(".facts").waitFor();
  },
  async run(page) {
    await page.goto(`${address}/console`);
    await page.getByRole("link", { name: "sft on capitals" }).click();
    await page.getByRole("heading", { name: "sft on capitals" }).waitFor();
    await page.locator(".chart").nth(5).waitFor();
    await page.getByText("Qwen/Qwen3-4B").waitFor();
    await page.getByText('{"learning_rate":0.0001}').waitFor();
    await page.getByText("Rename, group or archive").click();
    await look(page, "run");
    await page.getByRole("textbox", { name: "Name" }).fill("capitals, again");
    await page.getByRole("button", { name: "Save" }).click();
    await page.getByRole("heading", { name: "capitals, again" }).waitFor();
    await page.getByRole("button", { name: "Archive" }).click();
    await page.getByRole("button", { name: "Take out of the archive" }).click();
    await page.getByRole("button", { name: "Archive" }).waitFor();
    await page.goto(`${address}/console/runs/00000000-train-0`);
    await page.getByText("datum 3 has 70,000 tokens").waitFor();
    await look(page, "run_failure");
    const points = await page.locator(".chart .u-over").first().boundingBox();
    await page.mouse.click(points.x + 0.5 * points.width, points.y + 30);
    await page.waitForURL(/samples\?metric=reward&axis=step&x=\d+/);
    await page.getByText(/asked for before step \d+ of reward/).waitFor();
    await look(page, "samples_of_point");
    await page.getByRole("link", { name: "See all samples." }).click();
    await page.getByText("asked for before").waitFor({ state: "detached" });
    await page.getByRole("link", { name: "Curves" }).click();
    await page.locator(".facts").waitFor();
    await page.getByRole("link", { name: "Runs" }).first().click();
    await page.locator(".split").waitFor();
    await page.goBack();
    await page.locator(".facts").waitFor();
  },
  async timing(page) {
    await page.goto(`${address}/console`);
    await page.getByRole("link", { name: "arithmetic rl" }).click();
    await page.getByRole("link", { name: "Timing" }).click();
    await page.getByText("The run spent the largest part of this time waiting for its client (46 %)").waitFor();
    await page.getByText("The run needs the workers of the group main: ready.").waitFor();
    assert.match(
      await page.locator(".share-bar").getAttribute("aria-label"),
      /^Waiting for the client 46 %, Computing 31 %, Other runs first 12 %/,
    );
    assert.equal(await page.locator(".shares tbody tr").count(), 5);
    assert.equal(await page.locator(".lanes").count(), 3);
    assert.match(await page.locator(".lanes svg").nth(2).getAttribute("aria-label"), /^\d+ times without a request, /);
    assert.ok((await page.locator(".lanes .s-device").count()) > 100);
    assert.equal(await page.getByText("taking turns with 1 other model, which has 3 micro-batches ready").count(), 1);
    await look(page, "timing");
    await page.getByText("15 min", { exact: true }).click();
    await page.waitForURL(/seconds=900/);
    await page.reload();
    assert.ok(await page.getByLabel("15 min").isChecked());
    await page.getByRole("link", { name: "Curves" }).click();
    await page.locator(".chart").first().waitFor();
  },
  async samples(page) {
    await page.goto(`${address}/console`);
    await page.getByRole("link", { name: "arithmetic rl" }).click();
    await page.getByRole("link", { name: "Samples" }).click();
    await page.getByText("What is 17 + 25?").waitFor();
    assert.equal(await page.locator("article").count(), 8);
    await page.getByText("version 24, after 240 steps").waitFor();
    await look(page, "samples");
    await page.getByLabel("Search prompts and answers").fill("adding");
    await page.getByLabel("Search prompts and answers").press("Enter");
    await page.getByText("4 of the newest 8 requests").waitFor();
    await page.waitForURL(/search=adding/);
    await page.reload();
    await page.getByText("4 of the newest 8 requests").waitFor();
    await page.getByText("highest advantage first").click();
    await page.waitForURL(/order=highest/);
    await page.reload();
    await page.locator("article td.number").first().waitFor();
    assert.equal(await page.locator("article td.number").first().textContent(), "+0.7500");
    await page.getByRole("link", { name: "This prompt over training" }).nth(1).click();
    await page.waitForURL(/samples\?prompt_of=0+/);
    await page.getByText("Samples of one prompt, from all weights").waitFor();
    await page.locator("article").nth(3).waitFor();
    assert.equal(await page.locator("article").count(), 4);
    await page.getByRole("link", { name: "6 samples side by side" }).first().click();
    await page.getByText("120 tokens left out").waitFor();
    assert.equal(await page.locator(".side-by-side section").count(), 4);
    const picture = page.getByRole("img", { name: "What the prompt shows, number 1" });
    await picture.scrollIntoViewIfNeeded();
    await picture.evaluate((img) => img.decode());
    assert.equal(await picture.evaluate((img) => img.naturalWidth), 96);
    await page.getByText("96 × 64 pixels, 6 tokens").waitFor();
    await page.getByText("best first").click();
    await page.waitForURL(/order=advantage/);
    await page.locator(".side-by-side section").first().getByText("4. advantage +0.7500,").waitFor();
    assert.ok((await page.locator(".side-by-side .lp-5").count()) > 0);
    assert.match(
      await page.locator(".side-by-side .lp-5").first().getAttribute("title"),
      /^token \d+: −\d\.\d\d \([\d.]+ %\)$/,
    );
    await page.getByText("Least likely:").first().waitFor();
    await page.getByLabel("Show where tokens begin").check();
    assert.equal(await page.locator(".tokens.bordered").count(), 5);
    await look(page, "sample_group");
    assert.equal(await page.getByRole("button", { name: "Alternatives of each token" }).count(), 0); // it has an image
    await page.getByRole("link", { name: "Samples" }).click();
    await page.locator("article").nth(7).waitFor();
    await page.getByRole("link", { name: "6 samples side by side" }).nth(1).click();
    const sample = page.getByRole("region", { name: "Sample 1", exact: true });
    await sample.getByRole("button", { name: "Alternatives of each token" }).click();
    await sample.locator(".tokens span").nth(1).click();
    const others = sample.locator(".alternatives");
    await others.getByRole("row", { name: /^·a −0.40 67 %/ }).waitFor();
    assert.equal(await others.locator("tbody tr").count(), 6);
    const drawn = await others.locator(".drawn code").textContent();
    await sample.locator(".tokens").press("ArrowRight");
    await others.locator(".drawn code").waitFor();
    assert.notEqual(await others.locator(".drawn code").textContent(), drawn);
    await look(page, "sample_alternatives");
    await page.setViewportSize({ width: 390, height: 800 });
    assert.equal(await page.evaluate(() => document.documentElement.scrollWidth), 390);
    await look(page, "phone_sample_alternatives");
  },
  async checkpoints(page) {
    await page.goto(`${address}/console`);
    await page.getByRole("link", { name: "Checkpoints" }).click();
    await page.getByRole("row", { name: /final public sampler arithmetic rl 400 0.8300 0.02100/ }).waitFor();
    await page.getByRole("row", { name: /early training arithmetic rl – – –/ }).waitFor();
    const names = async () => (await page.locator("tbody th").allTextContents()).map((text) => text.slice(1).trim());
    await page.getByRole("button", { name: "Reward" }).click();
    assert.match((await names())[0], /^peak/);
    assert.match((await names())[3], /^early/);
    await page.getByRole("button", { name: "Reward" }).click();
    assert.match((await names())[2], /^peak/);
    assert.match((await names())[3], /^early/);
    await page.getByRole("button", { name: "Details of final" }).click();
    await page.getByRole("button", { name: "Unpublish" }).waitFor();
    await page.getByRole("button", { name: "Details of final" }).click();
    await page.getByRole("button", { name: "Details of peak" }).click();
    await page.getByRole("button", { name: "Mark as the best of its run" }).click();
    await page.getByRole("button", { name: "Take the mark away" }).waitFor();
    await look(page, "checkpoints");
    await page.getByLabel("Metric").selectOption("entropy:mean");
    await page.waitForURL(/metric=entropy/);
    await page.getByRole("button", { name: "entropy:mean" }).waitFor();
    await page.getByLabel("Filter checkpoints").fill("step");
    await page.getByText("1 of 4").waitFor();
    await page.goto(`${address}/console/runs/00000000-train-0/checkpoints`);
    await page.getByRole("row", { name: /peak ★ best sampler 320/ }).waitFor();
    await look(page, "run_checkpoints");
    await page.getByRole("link", { name: "Compare with best: final" }).click();
    await page.waitForURL(/playground\?model=.*final&against=.*peak/);
  },
  async trajectories(page) {
    await page.goto(`${address}/console`);
    await page.getByRole("link", { name: "Trajectories" }).click();
    await page.getByRole("row", { name: "agent-17 Qwen3-4B · step 240 8 5 48,100 77 % 2,871 1 open" }).waitFor();
    await look(page, "trajectories");
    await page.getByRole("button", { name: "Reward" }).click();
    await page.waitForURL(/sort=reward&ascending=false/);
    await page.getByRole("link", { name: "agent-17" }).click();
    const turn = (number) => page.getByRole("article", { name: `Turn ${number}`, exact: true });
    await turn(6).getByText("352 tokens left out").waitFor();
    assert.deepEqual(await page.locator(".cause").allTextContents(), [
      "first turn",
      "another conversation",
      "the same messages again, after turn 1",
      "message 7 was edited, after turn 2",
      "other tools or template variables",
    ]);
    await turn(4).getByText("a tool call cannot be read").waitFor();
    await turn(7).getByText("cut: its client has hung up").waitFor();
    await turn(6).getByText("cut off by max_tokens").waitFor();
    await turn(1).getByText("underlined: a grammar left no choice").waitFor();
    assert.match(await turn(1).locator(".forced").first().getAttribute("title"), /, forced by a grammar$/);
    assert.match(await turn(1).locator("[class^=lp-]").nth(3).getAttribute("title"), /^token " \\"search\\"": −\d/);
    await look(page, "trajectory");
    await turn(1).getByRole("button", { name: "Show 1,800 more characters" }).click();
    await turn(1)
      .getByRole("button", { name: /more characters/ })
      .waitFor({ state: "detached" });
    await page.getByRole("button", { name: "Close all" }).click();
    assert.equal(await page.locator(".tokens").count(), 0);
    await turn(3).getByRole("button").click();
    await turn(3).locator(".tokens").waitFor();
    assert.equal(await page.locator(".tokens").count(), 1);
  },
  async playground(page) {
    await page.goto(`${address}/console`);
    await page.getByRole("link", { name: "Playground" }).click();
    await page.getByLabel("Prompt").fill("What is 17 + 25?");
    await page.getByLabel("Samples").fill("2");
    await page.getByRole("button", { name: "Complete" }).click();
    await page.getByText("Sample 2: 19 tokens, ended by stop sequence").waitFor();
    assert.match(await page.locator(".message pre").first().textContent(), /from the right \.\n43 😀$/);
    await page.getByLabel("Colour tokens").check();
    const spans = page.locator(".message").first().locator("[class^=lp-]");
    assert.equal(await spans.count(), 19);
    assert.deepEqual((await spans.allTextContents()).slice(-4), ["43", "", " 😀", ""]);
    await look(page, "playground");
    await page.getByLabel("Prompt").fill("Slowly, please.");
    await page.getByRole("button", { name: "Complete" }).click();
    await page.getByText("Sample 2: 3 tokens", { exact: true }).waitFor(); // it streams
    await page.getByRole("button", { name: "Stop" }).click();
    await page.getByText("Sampling …").waitFor({ state: "detached" });
    assert.ok(await page.getByRole("button", { name: "Complete" }).isEnabled());
    assert.ok((await page.locator(".message").nth(1).locator("[class^=lp-]").count()) < 19);
    assert.equal(await page.locator(".problem").count(), 0);
    await page.getByLabel("Compare with").selectOption({ index: 2 });
    await page.waitForURL(/against=tinker/);
    await page.getByLabel("Prompt").fill("What is 17 + 25?");
    await page.getByRole("button", { name: "Complete" }).click();
    await page.locator(".pair section").nth(1).getByText("Sample 2: 19 tokens, ended by stop sequence").waitFor();
    assert.deepEqual(await page.locator(".pair h2").allTextContents(), [
      "Qwen/Qwen3-4B (base model)",
      "step 240 · 00000000",
    ]);
    await look(page, "playground_pair");
    await page.getByText("Chat", { exact: true }).click();
    await page.waitForURL(/mode=chat/);
    await page.getByLabel("Model").selectOption({ index: 1 });
    await page.waitForURL(/model=tinker/);
    await page.getByLabel("System message").fill("Be brief.");
    const buffer = Buffer.from("iVBORw0KGgo=", "base64");
    await page.getByLabel("Image (PNG or JPEG)").setInputFiles({ name: "a.png", mimeType: "image/png", buffer });
    for (const message of ["What is 17 + 25?", "Thank you."]) {
      await page.getByLabel("Message", { exact: true }).fill(message);
      await page.getByLabel("Message", { exact: true }).press("Control+Enter");
      await page.getByText("ended by stop sequence").waitFor();
    }
    assert.deepEqual(await page.locator(".message h3").allTextContents(), [
      "user, with an image",
      "assistant",
      "user",
      "assistant: 19 tokens, ended by stop sequence",
    ]);
    await look(page, "playground_chat");
    await page.getByRole("button", { name: "New conversation" }).click();
    assert.equal(await page.locator(".message").count(), 0);
    await page.reload();
    assert.equal(await page.getByLabel("Model").inputValue(), "tinker://00000000-train-0/sampler_weights/step 240");
  },
  async server(page) {
    await page.goto(`${address}/console`);
    await page.getByRole("link", { name: "Server" }).click();
    await page.getByRole("heading", { name: "Server", exact: true }).waitFor();
    await page.getByText("worker 1 on node-b was killed by signal 9").waitFor();
    await page.getByText("121 of 133 ready, compiling prefill 16x1024").waitFor();
    assert.equal(await page.getByRole("row", { name: /^ada 52 %/ }).count(), 1);
    await page.getByText("and 3 younger ones").waitFor();
    assert.equal(await page.getByText("there are none").count(), 0);
    await page.getByRole("row", { name: "main Qwen/Qwen3-4B train and sample 2 2 4 3 87 % ready" }).waitFor();
    await page.getByRole("row", { name: /^teacher .* 0 % failed, and tried again later: model-00003/ }).waitFor();
    await look(page, "server");
    await page.getByText("teacher", { exact: true }).last().click();
    await page.waitForURL(/group=teacher/);
    await page.getByText("No workers were ready yet.").waitFor();
    assert.equal(await page.getByText("worker 1 on node-b was killed by signal 9").count(), 0);
    await page.reload();
    await page.locator(".facts").getByText("Qwen/Qwen3-30B-A3B").waitFor();
  },
  async people(page) {
    await page.goto(`${address}/console`);
    await page.getByRole("link", { name: "People" }).click();
    await page.getByRole("row", { name: /^grace 77fe02d1 user 4 adapters, 20 requests per second/ }).waitFor();
    await page.getByRole("row", { name: /key revoked ada ada key 0d2a8b3c$/ }).waitFor();
    assert.equal(await page.getByText("was revoked").count(), 0);
    assert.equal(await page.locator(".series g").count(), 3 * 24);
    await look(page, "people");
    await page.getByLabel("Show revoked").check();
    await page.getByText("was revoked").waitFor();
    await page.getByText("7 days", { exact: true }).click();
    await page.waitForURL(/hours=168/);
    await page.waitForFunction(() => document.querySelectorAll(".series g").length === 3 * 168);
    const all = await page.locator(".chart .at").first().textContent();
    await page.getByLabel("Owner").selectOption("grace");
    assert.notEqual(await page.locator(".chart .at").first().textContent(), all);
    await page.getByLabel("Filter events").fill("checkpoint grace");
    await page.getByText("1 of 3 events").waitFor();
  },
  async not_found(page) {
    await page.goto(`${address}/console/nowhere`);
    await page.getByText("There is no page /nowhere.").waitFor();
    await look(page, "not_found");
    await page.getByRole("link", { name: "See all runs." }).click();
    await page.locator(".run").first().waitFor();
  },
  async no_rights(page) {
    let asked = 0;
    page.on("request", (request) => request.url().endsWith("/console/api/server") && asked++);
    await page.goto(`${address}/console/server`);
    await page.getByRole("alert").getByText("this key is not an admin's").waitFor();
    await page.waitForTimeout(7000); // twice the time after which a page asks again
    assert.equal(asked, 1);
  },
  async phone(page) {
    await page.setViewportSize({ width: 390, height: 800 });
    await page.goto(`${address}/console`);
    await page.locator(".chart").first().waitFor();
    const isNarrow = async () =>
      assert.equal(await page.evaluate(() => document.documentElement.scrollWidth), 390, page.url());
    await isNarrow();
    await look(page, "phone");
    const run = "/runs/00000000-train-0";
    const pages = {
      [`${run}/timing`]: ".lanes",
      [`${run}/samples`]: "article",
      [`${run}/samples/0`]: ".tokens",
      "/checkpoints": "table",
      [`${run}/checkpoints`]: "table",
      "/trajectories": "table",
      "/trajectories/trj_0": ".tokens",
      "/playground": "textarea",
      "/server": ".series",
      "/people": ".series",
    };
    for (const [path, part] of Object.entries(pages)) {
      await page.goto(`${address}/console${path}`);
      await page.locator(part).first().waitFor();
      await isNarrow();
      await look(page, `phone_${path.slice(1).replaceAll("/", "_")}`);
    }
  },
  async tabs(page) {
    const count = async () => (await page.request.get(`${address}/console/api/stream-count`)).json();
    const tabs = [page];
    while (tabs.length < 10) tabs.push(await page.context().newPage());
    for (const tab of tabs) {
      await tab.goto(`${address}/console/runs/00000000-train-0`);
      await tab.locator(".chart").first().waitFor();
    }
    assert.equal((await count()).now, 1);
    await page.goto(`${address}/console/checkpoints`); // a page without news leaves; the others go on
    await tabs[9].reload();
    await tabs[9].locator(".chart").first().waitFor();
    assert.deepEqual(await count(), { now: 1, most: 1 });
  },
  async sign_in(page) {
    let release;
    const held = new Promise((resolve) => (release = resolve));
    await page.route(
      "**/console/api/runs*",
      async (route) => {
        const refused = await route.fetch(); // asked for without a key
        await held;
        await route.fulfill({ response: refused });
      },
      { times: 1 },
    );
    await page.goto(`${address}/console`);
    await page.getByLabel("API key").fill("tml-wrong");
    await look(page, "sign_in");
    await page.getByRole("button", { name: "Sign in" }).click();
    await page.getByText("this API key is not known").waitFor();
    await page.getByLabel("API key").fill("tml-known");
    await page.getByLabel("API key").press("Enter");
    await page.locator(".run").first().waitFor();
    release(); // the page has a key since
    await page.waitForTimeout(300);
    assert.equal(await page.getByLabel("API key").count(), 0);
    await page.locator(".run").first().waitFor();
  },
  ...liveStories({ address, facts, look, another: openPage }),
};

/** Checks the page with axe, and takes its picture, in both themes. */
async function look(page, name) {
  for (const theme of ["light", "dark"]) {
    if ((await page.evaluate(() => document.documentElement.dataset.theme)) !== theme)
      await page.getByRole("button", { name: `Use ${theme} colours` }).click();
    await page.waitForTimeout(300); // the curves are drawn in the next frames
    await page.evaluate(axe);
    const { violations } = await page.evaluate(() => globalThis.axe.run());
    const faults = violations.filter(({ impact }) => impact === "serious" || impact === "critical");
    assert.deepEqual(
      faults.map(({ id, nodes }) => [id, theme, nodes.map((node) => node.html)]),
      [],
    );
    if (process.env.SCREENSHOTS)
      await page.screenshot({
        fullPage: name === "server",
        path: join(process.env.SCREENSHOTS, `console_${name}_${theme}.png`),
      });
  }
}

const browser = await chromium.launch({ executablePath, args: process.getuid?.() ? [] : ["--no-sandbox"] });
const errors = [];
const contexts = [];

/** Opens a page with cookies of its own. Its errors, and those of pages that it opens, fail the story. */
async function openPage() {
  const context = await browser.newContext({ viewport: { width: 1360, height: 820 } });
  contexts.push(context);
  context.setDefaultTimeout(60_000);
  context.on(
    "console",
    (message) => message.type() === "error" && !isAllowed(message.text()) && errors.push(message.text()),
  );
  context.on("weberror", (error) => errors.push(error.error().stack));
  return context.newPage();
}

try {
  await STORIES[story](await openPage()).catch(async (error) => {
    const pages = contexts.flatMap((context) => context.pages());
    const shown = await Promise.all(pages.map((each) => each.locator("body").textContent()));
    throw new Error([error.stack, ...errors, ...shown.map((text) => text.slice(0, 1000))].join("\n---\n"));
  });
  assert.deepEqual(errors, []);
} finally {
  await browser.close();
}
