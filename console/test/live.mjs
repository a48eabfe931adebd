// Stories for pages of a real server, on which tenants train and sample meanwhile.
import assert from "node:assert/strict";
import { readFileSync } from "node:fs";

/**
 * `facts` has the key to sign in with, and what a story must know; `look` checks a page and takes its picture.
 * `another` opens the page of somebody else, with cookies of its own.
 */
export function liveStories({ address, facts, look, another }) {
  async function signIn(page, key = facts.key) {
    await page.goto(`${address}/console`);
    await page.getByLabel("API key").fill(key);
    await page.getByLabel("API key").press("Enter");
    await page.getByRole("heading", { name: "Runs" }).waitFor();
  }

  /** Waits until what a chart of a page shows has changed some times. */
  async function changing(page, name) {
    const chart = page.locator(".chart", { hasText: name }).first().locator("[role=img]");
    const until = Date.now() + 90_000;
    const seen = [];
    while (seen.length < 4) {
      assert.ok(Date.now() < until, `${name} of ${page.url()} is as it was`);
      const shown = await chart.getAttribute("aria-label");
      if (shown !== seen.at(-1)) seen.push(shown);
      await page.waitForTimeout(200);
    }
  }

  /** Checks that somebody's list has one run, and that the pages of another run do not exist. */
  async function seesOnly(page, mine, theirs) {
    await page.goto(`${address}/console`);
    await page.locator(`.run a[href*="${mine.split(":")[0]}"]`).waitFor();
    assert.equal(await page.locator(".run").count(), 1);
    for (const path of ["", "/timing", "/samples"]) {
      await page.goto(`${address}/console/runs/${theirs}${path}`);
      await page.locator(".problem", { hasText: "does not exist" }).waitFor();
      assert.equal(await page.locator(".chart, article, .lanes").count(), 0);
    }
  }

  return {
    async live_curves(page) {
      await signIn(page);
      await page.getByRole("link", { name: facts.name }).click();
      const loss = page.locator(".chart", { hasText: "loss per token" });
      await loss.waitFor();
      const steps = () => page.locator(".facts div", { hasText: "Steps" }).locator("dd").textContent().then(Number);
      const before = [await steps(), await loss.locator(".values").textContent()];
      await page.waitForFunction(([count, value]) => {
        const fact = [...document.querySelectorAll(".facts div")].find(
          (each) => each.firstChild.textContent === "Steps",
        );
        const chart = [...document.querySelectorAll(".chart")].find((each) =>
          each.textContent.includes("loss per token"),
        );
        return Number(fact.lastChild.textContent) >= count + 3 && chart.querySelector(".values").textContent !== value;
      }, before);
      console.log("late");
      await page.locator(".chart", { hasText: "judged later" }).waitFor();
      await page.goto(`${address}/console/runs/%ZZ`); // no proper escape
      await page.getByRole("alert").waitFor();
    },
    async live_health(page) {
      await signIn(page);
      const run = page.locator(".run", { hasText: facts.name });
      await run.locator(".when", { hasText: "running" }).waitFor();
      console.log("kill");
      const began = Date.now();
      await run.locator(".reason", { hasText: /^no heartbeat for \d+ s$/ }).waitFor();
      console.log(`said after ${Date.now() - began} ms`);
      await run.locator(".when", { hasText: "silent" }).waitFor();
      await look(page, "live_health");
      await run.getByRole("link").click();
      await page.locator(".facts dd.bad", { hasText: "client silent: no heartbeat for" }).waitFor();
    },
    async live_recipes(page) {
      await signIn(page);
      await seesOnly(page, facts.rl, facts.sl);
      await page.goto(`${address}/console/runs/${facts.rl}`);
      await changing(page, "reward/total"); // which the recipe logs
      for (const name of [
        "abs_advantage:mean",
        "loss per token",
        "answer_tokens:mean",
        "answers_cut_off:mean",
        "entropy:mean",
        "unclipped_grad_l2:mean",
      ])
        await page.locator(".chart", { hasText: name }).first().waitFor();
      await changing(page, "entropy:mean"); // which the server knows by itself
      await look(page, "live_rl_loop");

      const other = await another();
      await signIn(other, facts.other);
      await seesOnly(other, facts.sl, facts.rl);
      await other.goto(`${address}/console/runs/${facts.sl}`);
      await changing(other, "loss per token");
      await look(other, "live_sl_loop");

      const tabs = [page];
      while (tabs.length < 10) {
        tabs.push(await page.context().newPage());
        await tabs.at(-1).goto(`${address}/console/runs/${facts.rl}`);
      }
      console.log("tabs");
      await Promise.all(tabs.map((tab) => changing(tab, "reward/total")));

      console.log("kill");
      const silent = (tab) => tab.locator(".facts dd.bad", { hasText: /^client silent: no heartbeat for \d+ s$/ });
      await Promise.all(tabs.map((tab) => silent(tab).waitFor()));
      await look(page, "live_killed");
      await changing(other, "loss per token"); // nobody else notices
      assert.equal(await other.locator(".facts dd.bad").count(), 0);
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
      for (const path of ["", "/timing", "/samples", `/samples/${facts.request}`].map(
        (page) => `/runs/${facts.run}${page}`,
      )) {
        await page.goto(`${address}/console${path}`);
        await page.locator(".problem", { hasText: "does not exist" }).waitFor();
        assert.equal(await page.getByText(facts.theirs).count(), 0);
      }
      for (const path of ["server", "people"]) {
        await page.goto(`${address}/console/${path}`);
        await page.locator(".problem", { hasText: "for admins" }).first().waitFor();
      }
      await page.getByRole("button", { name: "Sign out" }).click();
      await page.getByLabel("API key").waitFor();
      await page.reload();
      await page.getByLabel("API key").waitFor();
    },
    async live_checkpoints(page) {
      await signIn(page);
      await page.getByRole("link", { name: "Checkpoints" }).click();
      const row = page.locator("tr", { has: page.getByRole("button", { name: "Details of to sample", exact: true }) });
      await row.waitFor();
      assert.equal(await row.locator("td").nth(2).textContent(), "1"); // step: it was saved behind one
      assert.match(await row.locator("td").nth(4).textContent(), /^\d/); // loss
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
      await page.getByRole("button", { name: "Mark as the best of its run" }).click();
      await row.getByText("★ best").waitFor();
      await page.reload();
      await row.getByText("★ best").waitFor();
      await row.getByRole("button").click();
      await page.getByRole("button", { name: "in 7 days" }).click();
      await row.getByText("in 7 d").waitFor();
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
    async live_trajectories(page) {
      await signIn(page);
      await page.getByRole("link", { name: "Trajectories" }).click();
      const row = page.getByRole("row", { name: new RegExp(`^${facts.name} .* 5 4 [\\d,]+ \\d+ % \\d+ 0.7500 open`) });
      await row.waitFor();
      assert.equal(await page.getByText(facts.theirs).count(), 0);
      console.log("more");
      await page.getByRole("link", { name: "agent-2" }).waitFor(); // without a reload
      await page.getByRole("button", { name: "Name" }).click();
      await page.waitForURL(/sort=name/);
      await page.getByRole("button", { name: "Reward" }).click();
      await row.waitFor();
      await page.getByLabel("Search names").fill("AGENT-1");
      await page.getByLabel("Search names").press("Enter");
      await page.getByRole("link", { name: "agent-2" }).waitFor({ state: "detached" });
      await page.reload();
      await row.waitFor();
      await look(page, "trajectories");
      await page.getByText("finished", { exact: true }).click();
      await page.getByText("No trajectory has this name and state.").waitFor();
      await page.getByLabel("all", { exact: true }).check();
      await row.getByRole("link").click();
      await page.locator(".turn").nth(4).locator(".tokens").waitFor();
      assert.deepEqual(await page.locator(".cause").allTextContents(), [
        "first turn",
        "the same messages again, after turn 1",
        "message 2 was edited, after turn 1",
        "another conversation",
      ]);
      assert.ok((await page.locator(".turn .tokens [class^=lp-]").count()) >= 5);
      await page.getByText("And at <b>5</b>?").waitFor();
      await look(page, "trajectory");
      await page.getByRole("button", { name: "Close all" }).click();
      await page.locator(".turn .tokens").first().waitFor({ state: "detached" });
      await page.getByRole("button", { name: "Turn 2", exact: true }).click();
      await page.locator(".turn .tokens").waitFor();
      await page.setViewportSize({ width: 390, height: 800 });
      assert.equal(await page.evaluate(() => document.documentElement.scrollWidth), 390);
      await look(page, "phone_trajectory");
      await page.goto(`${address}/console/trajectories/unknown`);
      await page.locator(".problem", { hasText: "there is no trajectory" }).waitFor();
    },
    async live_playground(page) {
      await signIn(page);
      await page.getByRole("link", { name: "Checkpoints" }).click();
      const row = page.locator("tr", {
        has: page.getByRole("button", { name: "Details of to play with", exact: true }),
      });
      await row.getByRole("link", { name: "Sample" }).click();
      if (facts.may_sample === "no") {
        await page.getByText("This API key may only read.").waitFor();
        assert.ok(await page.getByRole("button", { name: "Complete" }).isDisabled());
        return;
      }
      await page.getByLabel("Prompt").fill("1 + 2 = ");
      await page.getByLabel("Max tokens").fill("12");
      await page.getByLabel("Samples").fill("2");
      await page.getByRole("button", { name: "Complete" }).click();
      await page.locator(".message", { hasText: /Sample 2: \d+ tokens, ended by/ }).waitFor();
      await page.getByText("Chat", { exact: true }).click();
      await page.getByLabel("Message", { exact: true }).fill("How much is 1 + 2?");
      await page.getByRole("button", { name: "Send" }).click();
      await page.locator(".message.assistant", { hasText: /assistant: \d+ tokens, ended by/ }).waitFor();
      await page.getByLabel("Model").selectOption({ index: 0 });
      await page.getByLabel("Max tokens").fill("0");
      await page.getByLabel("Message", { exact: true }).fill("no");
      await page.getByRole("button", { name: "Send" }).click();
      assert.ok(await page.getByLabel("Max tokens").evaluate((input) => !input.checkValidity()));
      await page.getByText("Completion", { exact: true }).click();
      await page.getByLabel("Prompt").fill("no");
      await page.getByLabel("Max tokens").fill("100000000");
      await page.getByRole("button", { name: "Complete" }).click();
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
      await page.locator(".chart", { hasText: "Tokens trained on" }).locator(".series rect").first().waitFor();
      await page
        .getByRole("row", { name: /session created alice alice session id/ })
        .first()
        .waitFor();
      page.once("dialog", (dialog) => dialog.accept());
      await page.getByRole("button", { name: /Revoke key [0-9a-f]{8} of erin/ }).click();
      await page.getByRole("button", { name: /of erin$/ }).waitFor({ state: "detached" });
      await page.getByLabel("Show revoked").check();
      await page.getByRole("row", { name: /^erin .* was revoked/ }).waitFor();
      await page.getByRole("row", { name: /key revoked root erin key/ }).waitFor();
    },
    async pictures(page) {
      await page.goto(`${address}/console`);
      await page.getByLabel("API key").waitFor();
      await look(page, "sign_in");
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
      await page
        .getByRole("link", { name: /side by side/ })
        .first()
        .click();
      await page.locator(".side-by-side section").nth(3).waitFor();
      await look(page, "sample_group");
      const sample = page.locator(".side-by-side section").first();
      await sample.getByRole("button", { name: "Alternatives of each token" }).click();
      await sample.locator(".alternatives").waitFor();
      await sample.locator(".tokens span").nth(2).click();
      await look(page, "sample_alternatives");
      await page.goto(`${run}/checkpoints`);
      await page.getByRole("button", { name: "Details of step 30" }).click();
      await page.getByRole("button", { name: "Mark as the best of its run" }).click();
      await page.getByText("★ best").waitFor();
      await look(page, "run_checkpoints");
      await page.getByLabel("Pages", { exact: true }).getByRole("link", { name: "Checkpoints" }).click();
      const row = page.locator("tr", { has: page.getByRole("button", { name: "Details of final" }) }).first();
      await row.getByRole("button").click();
      await look(page, "checkpoints");
      await row.getByRole("link", { name: "Sample" }).click();
      await page.getByLabel("Prompt").fill("Tell me a tale.");
      await page.getByLabel("Max tokens").fill("24");
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
      await page.getByRole("link", { name: "Trajectories" }).click();
      await page.getByRole("link", { name: "agent-1" }).click();
      await page.locator(".turn").nth(4).locator(".tokens").waitFor();
      await look(page, "trajectory");
      await page.getByRole("link", { name: "People" }).click();
      await page.locator(".chart .series rect").first().waitFor();
      await look(page, "people");
      await page.setViewportSize({ width: 390, height: 800 });
      await page.goto(run);
      await page.locator(".chart").nth(3).waitFor();
      await look(page, "phone");
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
}
