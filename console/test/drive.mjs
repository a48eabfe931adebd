// Drives one page in Chromium: node test/drive.mjs STORY ADDRESS CHROMIUM [FACTS]. FACTS are what a story must know, as JSON.
// A line on standard output says that something may happen to the server now. With SCREENSHOTS=DIR it keeps pictures.
import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import { createRequire } from "node:module";
import { join } from "node:path";
import { chromium } from "playwright-core";

const [story, address, executablePath, text] = process.argv.slice(2);
const facts = JSON.parse(text ?? "{}");
const axe = readFileSync(createRequire(import.meta.url).resolve("axe-core/axe.min.js"), "utf8");
const needsKey = story === "sign_in" || "key" in facts;
const isAllowed = (text) => needsKey && /status of 40[0134]/.test(text); // the browser tells of each refused key

const STORIES = {
  async runs(page) {
    await page.goto(`${address}/console`);
    await page.locator(".run").nth(4).waitFor();
    await page.locator(".chart").first().waitFor();
    assert.equal(await page.locator(".run input:checked").count(), 3);
    assert.equal(await page.locator(".chart .name").first().textContent(), "reward");
    await page.locator(".chart", { hasText: "loss per token" }).locator(".values li").nth(2).waitFor();
    await look(page, "runs");
    await page.getByLabel("Smoothing").fill("0.9");
    await page.getByText("time", { exact: true }).click();
    await page.waitForURL(/x=time/);
    await page.waitForURL(/smoothing=0.9/);
    await page.locator(".run input").first().click();
    assert.equal(await page.locator(".chart").first().locator(".values li").count(), 2);
    const saving = page.waitForEvent("download");
    await page.getByRole("button", { name: "Export CSV" }).click();
    const rows = readFileSync(await (await saving).path(), "utf8").trim().split("\n");
    assert.equal(rows.length, 1 + 2 * 400);
    assert.match(rows[0], /^run,step,at,reward,loss per token,/);
    await page.keyboard.press("Escape");
    await page.locator("body").press("/");
    await page.keyboard.type("odd &");
    assert.equal(await page.locator(".run").count(), 1);
    assert.equal(await page.locator(".run a").textContent(), "<b>odd & name</b>");
    await page.reload();
    await page.locator(".chart").first().waitFor();
    assert.equal(await page.locator(".run input:checked").count(), 2);
    assert.equal(await page.getByLabel("Smoothing").inputValue(), "0.9");
  },
  async run(page) {
    await page.goto(`${address}/console`);
    await page.getByRole("link", { name: "sft on capitals" }).click();
    await page.getByRole("heading", { name: "sft on capitals" }).waitFor();
    await page.locator(".chart").nth(5).waitFor();
    await page.getByText("Qwen/Qwen3-4B").waitFor();
    await page.getByText('{"learning_rate":0.0001}').waitFor();
    await look(page, "run");
    await page.getByRole("link", { name: "Runs" }).first().click();
    await page.locator(".split").waitFor();
    await page.goBack();
    await page.locator(".facts").waitFor();
  },
  async timing(page) {
    await page.goto(`${address}/console`);
    await page.getByRole("link", { name: "arithmetic rl" }).click();
    await page.getByRole("link", { name: "Timing" }).click();
    await page.getByText("The run spent most of this time waiting for its client (46 %)").waitFor();
    assert.match(await page.locator(".share-bar").getAttribute("aria-label"), /^Client 46 %, Device 31 %, Queue 12 %/);
    assert.equal(await page.locator(".shares tbody tr").count(), 5);
    assert.equal(await page.locator(".lanes").count(), 2);
    assert.ok((await page.locator(".lanes .s-device").count()) > 100);
    assert.equal(await page.getByText("3 micro-batches of 1 other model ready").count(), 1);
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
    await page.getByRole("link", { name: "6 samples side by side" }).first().click();
    await page.getByText("120 tokens left out").waitFor();
    assert.equal(await page.locator(".side-by-side section").count(), 4);
    assert.ok((await page.locator(".side-by-side .lp-5").count()) > 0);
    assert.match(await page.locator(".side-by-side .lp-5").first().getAttribute("title"), /^token \d+: −\d\.\d\d \([\d.]+ %\)$/);
    await page.getByText("Least likely:").first().waitFor();
    await look(page, "sample_group");
    await page.getByRole("link", { name: "Samples" }).click();
    await page.locator("article").nth(7).waitFor();
  },
  async playground(page) {
    await page.goto(`${address}/console`);
    await page.getByRole("link", { name: "Playground" }).click();
    await page.getByLabel("Prompt").fill("What is 17 + 25?");
    await page.getByLabel("Samples").fill("2");
    await page.getByRole("button", { name: "Complete" }).click();
    await page.getByText("Sample 2: 19 tokens, ended by stop").waitFor();
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
    await page.getByText("Chat", { exact: true }).click();
    await page.waitForURL(/mode=chat/);
    await page.getByLabel("Model").selectOption({ index: 1 });
    await page.waitForURL(/model=tinker/);
    await page.getByLabel("System message").fill("Be brief.");
    for (const message of ["What is 17 + 25?", "Thank you."]) {
      await page.getByLabel("Message", { exact: true }).fill(message);
      await page.getByLabel("Message", { exact: true }).press("Control+Enter");
      await page.getByText("ended by stop").waitFor();
    }
    assert.deepEqual(await page.locator(".message h3").allTextContents(), ["user", "assistant", "user", "assistant: 19 tokens, ended by stop"]);
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
    assert.equal(await page.getByText("there are none").count(), 0);
    await look(page, "server");
  },
  async people(page) {
    await page.goto(`${address}/console`);
    await page.getByRole("link", { name: "People" }).click();
    await page.getByRole("row", { name: /^grace 77fe02d1 user 4 adapters, 20 requests per second/ }).waitFor();
    await page.getByRole("row", { name: /key revoked ada ada key 0d2a8b3c$/ }).waitFor();
    assert.equal(await page.getByText("was revoked").count(), 0);
    assert.equal(await page.locator(".series rect").count(), 3 * 24);
    await look(page, "people");
    await page.getByLabel("Show revoked").check();
    await page.getByText("was revoked").waitFor();
    await page.getByText("7 days", { exact: true }).click();
    await page.waitForURL(/hours=168/);
    await page.waitForFunction(() => document.querySelectorAll(".series rect").length === 3 * 168);
    const all = await page.locator(".chart .at").first().textContent();
    await page.getByLabel("Owner").selectOption("grace");
    assert.notEqual(await page.locator(".chart .at").first().textContent(), all);
    await page.getByLabel("Filter events").fill("checkpoint grace");
    await page.getByText("1 of 3 events").waitFor();
  },
  async not_found(page) {
    await page.goto(`${address}/console/nowhere`);
    await page.getByRole("link", { name: "See all runs." }).click();
    await page.locator(".run").first().waitFor();
  },
  async phone(page) {
    await page.setViewportSize({ width: 390, height: 800 });
    await page.goto(`${address}/console`);
    await page.locator(".chart").first().waitFor();
    const isNarrow = async () => assert.equal(await page.evaluate(() => document.documentElement.scrollWidth), 390, page.url());
    await isNarrow();
    await look(page, "phone");
    const run = "/runs/00000000-train-0";
    const pages = { [`${run}/timing`]: ".lanes", [`${run}/samples`]: "article", [`${run}/samples/0`]: ".tokens", "/playground": "textarea", "/server": ".series", "/people": ".series" };
    for (const [path, part] of Object.entries(pages)) {
      await page.goto(`${address}/console${path}`);
      await page.locator(part).first().waitFor();
      await isNarrow();
    }
  },
  async sign_in(page) {
    await page.goto(`${address}/console`);
    await page.getByLabel("API key").fill("tml-wrong");
    await look(page, "sign_in");
    await page.getByRole("button", { name: "Sign in" }).click();
    await page.getByText("this API key is not known").waitFor();
    await page.getByLabel("API key").fill("tml-known");
    await page.getByLabel("API key").press("Enter");
    await page.locator(".run").first().waitFor();
  },
  async live_curves(page) {
    await signIn(page);
    await page.getByRole("link", { name: facts.name }).click();
    const loss = page.locator(".chart", { hasText: "loss per token" });
    await loss.waitFor();
    const steps = () => page.locator(".facts div", { hasText: "Steps" }).locator("dd").textContent().then(Number);
    const before = [await steps(), await loss.locator(".values").textContent()];
    await page.waitForFunction(
      ([count, value]) => {
        const fact = [...document.querySelectorAll(".facts div")].find((each) => each.firstChild.textContent === "Steps");
        const chart = [...document.querySelectorAll(".chart")].find((each) => each.textContent.includes("loss per token"));
        return Number(fact.lastChild.textContent) >= count + 3 && chart.querySelector(".values").textContent !== value;
      },
      before,
    );
    console.log("late");
    await page.locator(".chart", { hasText: "judged later" }).waitFor();
  },
  async live_timing(page) {
    await signIn(page);
    await page.goto(`${address}/console/runs/${facts.run}/timing?seconds=60`);
    await page.locator(".summary", { hasText: facts.words }).waitFor();
    await page.locator(".lanes rect").first().waitFor();
    await look(page, `timing_${facts.cause}`);
  },
  async live_isolation(page) {
    await signIn(page);
    await page.getByText(facts.mine).first().waitFor();
    assert.equal(await page.getByText(facts.theirs).count(), 0);
    assert.equal(await page.getByRole("link", { name: "Server" }).count(), 0);
    for (const path of ["", "/timing", "/samples", `/samples/${facts.request}`].map((page) => `/runs/${facts.run}${page}`)) {
      await page.goto(`${address}/console${path}`);
      await page.locator(".problem", { hasText: "does not exist" }).waitFor();
      assert.equal(await page.getByText(facts.theirs).count(), 0);
    }
    for (const path of ["server", "people"]) {
      await page.goto(`${address}/console/${path}`);
      await page.locator(".problem", { hasText: "for admins" }).waitFor();
    }
  },
  async live_checkpoints(page) {
    await signIn(page);
    await page.getByRole("link", { name: "Checkpoints" }).click();
    const row = page.locator("tr", { has: page.getByRole("button", { name: "Details of to sample", exact: true }) });
    await row.waitFor();
    assert.equal(await page.getByText(facts.theirs).count(), 0);
    const saving = page.waitForEvent("download");
    await row.getByRole("link", { name: "Download" }).click();
    assert.ok(readFileSync(await (await saving).path()).length > 1000);
    if (facts.may_change === "no") {
      await row.getByRole("button").click();
      await page.getByText("sampler_weights/to sample").waitFor();
      assert.equal(await page.getByRole("button", { name: "Delete" }).count(), 0);
      return;
    }
    await row.getByRole("button").click();
    await look(page, "checkpoints");
    await page.getByRole("button", { name: "7 days" }).click();
    await row.getByText("in 7.0 d").waitFor();
    await page.getByRole("button", { name: "Publish" }).click();
    await row.getByText("public").waitFor();
    await page.getByRole("button", { name: "Unpublish" }).click();
    await row.getByText("public").waitFor({ state: "detached" });
    page.once("dialog", (dialog) => dialog.accept());
    await page.getByRole("button", { name: "Delete" }).click();
    await row.waitFor({ state: "detached" });
    assert.equal(await page.getByRole("button", { name: "Details of to train" }).count(), 1);
  },
  async live_samples(page) {
    await signIn(page);
    await page.goto(`${address}/console/runs/${facts.run}/samples`);
    await page.locator("article", { hasText: "after 1 step" }).first().waitFor();
    await page.getByText(facts.prompt).first().waitFor();
    console.log("more");
    await page.getByText(facts.later).first().waitFor(); // without a reload
    await page.getByLabel("Search prompts and answers").fill(facts.prompt);
    await page.getByRole("button", { name: "Search" }).click();
    await page.getByText(facts.later).first().waitFor({ state: "detached" });
    await page.getByRole("link", { name: "4 samples side by side" }).click();
    await page.locator(".side-by-side section").nth(3).waitFor();
    assert.equal(await page.locator("pre.tokens").first().textContent(), facts.prompt);
    assert.ok((await page.locator(".side-by-side [class^=lp-]").count()) >= 4 * 8);
    await look(page, "live_sample_group");
  },
  async live_playground(page) {
    await signIn(page);
    await page.getByRole("link", { name: "Checkpoints" }).click();
    const row = page.locator("tr", { has: page.getByRole("button", { name: "Details of to play with", exact: true }) });
    await row.getByRole("link", { name: "Sample" }).click();
    if (facts.may_sample === "no") {
      await page.getByText("This API key may only read.").waitFor();
      assert.ok(await page.getByRole("button", { name: "Complete" }).isDisabled());
      return;
    }
    await page.getByLabel("Prompt").fill("1 + 2 = ");
    await page.getByLabel("Most tokens").fill("12");
    await page.getByLabel("Samples").fill("2");
    await page.getByRole("button", { name: "Complete" }).click();
    await page.locator(".message", { hasText: /Sample 2: \d+ tokens, ended by/ }).waitFor();
    await page.getByText("Chat", { exact: true }).click();
    await page.getByLabel("Message", { exact: true }).fill("How much is 1 + 2?");
    await page.getByRole("button", { name: "Send" }).click();
    await page.locator(".message.assistant", { hasText: /assistant: \d+ tokens, ended by/ }).waitFor();
    await page.getByLabel("Model").selectOption({ index: 0 });
    await page.getByLabel("Most tokens").fill("0");
    await page.getByLabel("Message", { exact: true }).fill("no");
    await page.getByRole("button", { name: "Send" }).click();
    assert.ok(await page.getByLabel("Most tokens").evaluate((input) => !input.checkValidity()));
    await page.getByLabel("Most tokens").fill("100000000");
    await page.getByRole("button", { name: "Send" }).click();
    await page.locator(".problem", { hasText: "max_tokens" }).waitFor();
  },
  async live_revoked(page) {
    await signIn(page);
    await page.waitForTimeout(1500); // the stream is open
    console.log("revoke");
    const began = Date.now();
    await page.getByLabel("API key").waitFor();
    console.log(`signed out after ${Date.now() - began} ms`);
  },
  async live_people(page) {
    await signIn(page);
    await page.getByRole("link", { name: "People" }).click();
    await page.getByRole("row", { name: /^root [0-9a-f]{8} ?yours admin none/ }).waitFor();
    await page.locator(".chart", { hasText: "Tokens: trained" }).locator(".series rect").first().waitFor();
    await page.getByRole("row", { name: /session created alice alice session_id/ }).first().waitFor();
    page.once("dialog", (dialog) => dialog.accept());
    await page.getByRole("button", { name: /Revoke key [0-9a-f]{8} of erin/ }).click();
    await page.getByRole("button", { name: /of erin$/ }).waitFor({ state: "detached" });
    await page.getByLabel("Show revoked").check();
    await page.getByRole("row", { name: /^erin .* was revoked/ }).waitFor();
    await page.getByRole("row", { name: /key revoked root erin key/ }).waitFor();
  },
  async pictures(page) {
    await signIn(page);
    await page.locator(".run").nth(2).waitFor();
    await page.locator(".chart", { hasText: "reward" }).first().waitFor();
    await look(page, "runs");
    const run = `${address}/console/runs/${facts.run}`;
    await page.goto(run);
    await page.locator(".chart").nth(3).waitFor();
    await look(page, "run");
    console.log("go on");
    await page.waitForTimeout(60_000); // until the window of the next page is full
    await page.goto(`${run}/timing?seconds=60`);
    await page.locator(".lanes rect").first().waitFor();
    await look(page, "timing");
    await page.goto(`${run}/samples`);
    await page.locator("article").nth(3).waitFor();
    await look(page, "samples");
    await page.getByRole("link", { name: /side by side/ }).first().click();
    await page.locator(".side-by-side section").nth(3).waitFor();
    await look(page, "sample_group");
    await page.getByRole("link", { name: "Checkpoints" }).click();
    const row = page.locator("tr", { has: page.getByRole("button", { name: "Details of final" }) }).first();
    await row.getByRole("button").click();
    await look(page, "checkpoints");
    await row.getByRole("link", { name: "Sample" }).click();
    await page.getByLabel("Prompt").fill("Tell me a tale.");
    await page.getByLabel("Most tokens").fill("24");
    await page.getByLabel("Samples").fill("3");
    await page.getByLabel("Colour tokens").check();
    await page.getByRole("button", { name: "Complete" }).click();
    await page.getByText(/Sample 3: \d+ tokens, ended by/).waitFor();
    await look(page, "playground");
    await page.getByText("Chat", { exact: true }).click();
    for (const message of ["Tell me a tale.", "What did she say?"]) {
      await page.getByLabel("Message", { exact: true }).fill(message);
      await page.getByRole("button", { name: "Send" }).click();
      await page.getByText(/assistant: \d+ tokens, ended by/).waitFor();
    }
    await look(page, "playground_chat");
    await page.getByRole("link", { name: "Server" }).click();
    await page.getByText("was killed by signal 9 (SIGKILL)").first().waitFor();
    await look(page, "server");
    await page.getByRole("link", { name: "People" }).click();
    await page.locator(".chart .series rect").first().waitFor();
    await look(page, "people");
  },
  async live_generations(page) {
    await signIn(page);
    await page.getByRole("link", { name: "Server" }).click();
    await page.locator(".state", { hasText: "running" }).waitFor();
    await look(page, "live_server");
    console.log("kill");
    await page.getByText("was killed by signal 9 (SIGKILL)").first().waitFor();
    await page.getByRole("row", { name: /^2 .* running$/ }).waitFor();
  },
};

async function signIn(page) {
  await page.goto(`${address}/console`);
  await page.getByLabel("API key").fill(facts.key);
  await page.getByLabel("API key").press("Enter");
  await page.getByRole("heading", { name: "Runs" }).waitFor();
}

/** Checks the page with axe, and takes its picture, in both themes. */
async function look(page, name) {
  for (const theme of ["light", "dark"]) {
    if ((await page.evaluate(() => document.documentElement.dataset.theme)) !== theme)
      await page.getByRole("button", { name: `Use ${theme} colours` }).click();
    await page.waitForTimeout(300); // the curves are drawn in the next frames
    await page.evaluate(axe);
    const { violations } = await page.evaluate(() => globalThis.axe.run());
    const faults = violations.filter(({ impact }) => impact === "serious" || impact === "critical");
    assert.deepEqual(faults.map(({ id, nodes }) => [id, theme, nodes.map((node) => node.html)]), []);
    if (process.env.SCREENSHOTS) await page.screenshot({ fullPage: name === "server", path: join(process.env.SCREENSHOTS, `console_${name}_${theme}.png`) });
  }
}

const browser = await chromium.launch({ executablePath, args: process.getuid?.() ? [] : ["--no-sandbox"] });
try {
  const page = await browser.newPage({ viewport: { width: 1360, height: 820 } });
  page.setDefaultTimeout(60_000);
  const errors = [];
  page.on("console", (message) => message.type() === "error" && !isAllowed(message.text()) && errors.push(message.text()));
  page.on("pageerror", (error) => errors.push(error.stack));
  await STORIES[story](page).catch((error) => {
    throw new Error(`${error.stack}\nconsole: ${errors.join("\n")}`);
  });
  assert.deepEqual(errors, []);
} finally {
  await browser.close();
}
