// Builds the console into the Python package. The same source gives the same bytes.
import { build } from "esbuild";
import { createHash } from "node:crypto";
import { cpSync, readFileSync, readdirSync, rmSync, writeFileSync } from "node:fs";
import { dirname, join, relative, sep } from "node:path";
import { fileURLToPath } from "node:url";

const here = dirname(fileURLToPath(import.meta.url));
const out = join(here, "../spmd_tx/coordinator/http/console/static");

/** A digest of all source files; tests/console/test_built_files.py computes it in the same way. */
function sourceDigest() {
  const files = readdirSync(here, { recursive: true, withFileTypes: true })
    .filter((entry) => entry.isFile())
    .map((entry) => relative(here, join(entry.parentPath, entry.name)).split(sep).join("/"))
    .filter((path) => !path.startsWith("node_modules/"))
    .sort();
  const digest = createHash("sha256");
  for (const path of files)
    digest
      .update(`${path}\0`)
      .update(readFileSync(join(here, path)))
      .update("\0");
  return digest.digest("hex");
}

rmSync(out, { recursive: true, force: true });
await build({
  absWorkingDir: here,
  entryPoints: { console: "src/main.tsx", stream_worker: "src/stream_worker.ts" },
  outdir: join(out, "assets"),
  bundle: true,
  minify: true,
  format: "esm",
  target: "es2022",
  charset: "utf8",
  jsx: "automatic",
  jsxImportSource: "preact",
  legalComments: "eof",
  logLevel: "warning",
});
cpSync(join(here, "src/icon.svg"), join(out, "assets/icon.svg"));
writeFileSync(
  join(out, "index.html"),
  readFileSync(join(here, "src/index.html"), "utf8").replaceAll("SOURCE_DIGEST", sourceDigest()),
);
