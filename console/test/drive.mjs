// Drives one page in Chromium: node test/drive.mjs STORY ADDRESS CHROMIUM. With SCREENSHOTS=DIR it keeps pictures.
import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import { createRequire } from "node:module";
import { join } from "node:path";
import { chromium } from "playwright-core";

const [story, address, executablePath] = process.argv.slice(2);
const axe = readFileSync(createRequire(import.meta.url).resolve("axe-core/axe.min.js"), "utf8");
const isAllowed = (text) => story === "sign_in" && /40[14]/.test(text); // the browser tells of each refused key

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
  async not_found(page) {
    await page.goto(`${address}/console/nowhere`);
    await page.getByRole("link", { name: "See all runs." }).click();
    await page.locator(".run").first().waitFor();
  },
  async phone(page) {
    await page.setViewportSize({ width: 390, height: 800 });
    await page.goto(`${address}/console`);
    await page.locator(".chart").first().waitFor();
    assert.equal(await page.evaluate(() => document.documentElement.scrollWidth), 390);
    await look(page, "phone");
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
    assert.deepEqual(faults.map(({ id, nodes }) => [id, theme, nodes.map((node) => node.html)]), []);
    if (process.env.SCREENSHOTS) await page.screenshot({ path: join(process.env.SCREENSHOTS, `console_${name}_${theme}.png`) });
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
