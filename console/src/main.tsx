// Starts the console: the frame around every page, and which page an address opens.
import { render, type ComponentChildren } from "preact";
import { useEffect } from "preact/hooks";
import "@preact/signals";
import "uplot/dist/uPlot.min.css";
import "./style.css";
import { caller, identify, mustSignIn, signIns, signOut } from "./api";
import { Checkpoints } from "./pages/checkpoints";
import { People } from "./pages/people";
import { Playground } from "./pages/playground";
import { Run } from "./pages/run";
import { RunCheckpoints } from "./pages/run_checkpoints";
import { Runs } from "./pages/runs";
import { SampleGroup } from "./pages/sample_group";
import { Samples } from "./pages/samples";
import { Server } from "./pages/server";
import { SignIn } from "./pages/sign_in";
import { Timing } from "./pages/timing";
import { Trajectories } from "./pages/trajectories";
import { Trajectory } from "./pages/trajectory";
import { decoded } from "./logic/addresses";
import { address, place } from "./router";
import { theme, toggleTheme } from "./theme";

const PAGES: [RegExp, string, (id: string, other: string) => ComponentChildren][] = [
  [/^\/(?:runs\/?)?$/, "Runs", () => <Runs key={signIns.value} />],
  [/^\/runs\/([^/]+)$/, "Run", (id) => <Run key={`${id} ${signIns.value}`} id={id} />],
  [/^\/runs\/([^/]+)\/timing$/, "Timing", (id) => <Timing key={`${id} ${signIns.value}`} id={id} />],
  [/^\/runs\/([^/]+)\/samples$/, "Samples", (id) => <Samples key={`${id} ${signIns.value}`} id={id} />],
  [
    /^\/runs\/([^/]+)\/samples\/([^/]+)$/,
    "Samples",
    (id, request) => <SampleGroup key={`${request} ${signIns.value}`} id={id} request={request} />,
  ],
  [/^\/runs\/([^/]+)\/checkpoints$/, "Checkpoints", (id) => <RunCheckpoints key={`${id} ${signIns.value}`} id={id} />],
  [/^\/checkpoints$/, "Checkpoints", () => <Checkpoints key={signIns.value} />],
  [/^\/trajectories$/, "Trajectories", () => <Trajectories key={signIns.value} />],
  [/^\/trajectories\/([^/]+)$/, "Trajectory", (id) => <Trajectory key={`${id} ${signIns.value}`} id={id} />],
  [/^\/playground$/, "Playground", () => <Playground key={signIns.value} />],
  [/^\/people$/, "People", () => <People key={signIns.value} />],
  [/^\/server$/, "Server", () => <Server key={signIns.value} />],
];

function Page() {
  const path = place.value.path;
  const page = PAGES.find(([pattern]) => pattern.test(path));
  const title = mustSignIn.value ? "Sign in" : (page?.[1] ?? "Not found");
  useEffect(() => {
    document.title = `${title} · spmd_tx`;
  }, [title]);
  if (mustSignIn.value) return <SignIn />;
  if (!page)
    return (
      <>
        <h1>Not found</h1>
        <p class="empty">
          There is no page {path}. <a href={address("/")}>See all runs.</a>
        </p>
      </>
    );
  const [, id = "", other = ""] = page[0].exec(path)!.map(decoded);
  return <>{page[2](id, other)}</>;
}

function App() {
  const other = theme.value === "dark" ? "light" : "dark";
  const path = place.value.path;
  const signedIn = signIns.value;
  useEffect(() => void identify(), [signedIn]);
  return (
    <>
      <a class="skip" href="#main">
        Skip to content
      </a>
      <header>
        <a class="brand" href={address("/")}>
          spmd_tx
        </a>
        <nav aria-label="Pages">
          <a href={address("/")} aria-current={/^\/(runs|$)/.test(path) ? "page" : undefined}>
            Runs
          </a>
          <a href={address("/checkpoints")} aria-current={path === "/checkpoints" ? "page" : undefined}>
            Checkpoints
          </a>
          <a href={address("/trajectories")} aria-current={path.startsWith("/trajectories") ? "page" : undefined}>
            Trajectories
          </a>
          <a href={address("/playground")} aria-current={path === "/playground" ? "page" : undefined}>
            Playground
          </a>
          {caller.value?.role === "admin" && (
            <a href={address("/server")} aria-current={path === "/server" ? "page" : undefined}>
              Server
            </a>
          )}
          {caller.value?.role === "admin" && (
            <a href={address("/people")} aria-current={path === "/people" ? "page" : undefined}>
              People
            </a>
          )}
        </nav>
        {caller.value?.needs_key && !mustSignIn.value && (
          <span class="who">
            <span title={`role: ${caller.value.role}`}>
              {caller.value.owner}
              {caller.value.role !== "user" && <small> {caller.value.role}</small>}
            </span>{" "}
            <button type="button" onClick={signOut}>
              Sign out
            </button>
          </span>
        )}
        <button type="button" class="quiet" onClick={toggleTheme} aria-label={`Use ${other} colours`}>
          {theme.value === "dark" ? "☾" : "☀"}
        </button>
      </header>
      <main id="main" tabIndex={-1}>
        <Page />
      </main>
    </>
  );
}

render(<App />, document.getElementById("app")!);
