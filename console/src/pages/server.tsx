// The state of the server, for admins: tenants, throughput, memory, programs, generations of workers, disk.
import { useEffect, useState } from "preact/hooks";
import { getServer } from "../api";
import type { ServerPage } from "../api_types";
import { poll } from "../live";
import { url } from "../logic/addresses";
import { ago, bytes, dateTime, number, percent, span } from "../logic/format";
import { shortId } from "../logic/runs";
import { Columns, Head, Loading, Parts, Problem, Wide } from "../parts";
import { address } from "../router";
import { Groups } from "../server_groups";
import { Share } from "../share";

const POLL_SECONDS = 3;

export function Server() {
  const [page, setPage] = useState<ServerPage | null>(null);
  const [error, setError] = useState<string | null>(null);
  const show = (news: ServerPage) => {
    setPage(news);
    setError(null);
  };
  const failed = (refused: Error) => setError(refused.message);
  useEffect(() => poll(() => getServer().then(show), POLL_SECONDS, failed), []);
  return (
    <>
      <div class="bar">
        <h1>Server</h1>
        {page && <Phase page={page} />}
      </div>
      <Problem text={error} />
      {!page && !error && <Loading />}
      {page && (
        <>
          <About page={page} />
          <Groups groups={page.groups} now={page.now} />
          <Tenants page={page} />
          <Queue page={page} />
          <Work page={page} />
          <Disk page={page} />
          <Suspects page={page} />
        </>
      )}
    </>
  );
}

function Phase({ page }: { page: ServerPage }) {
  const problem = page.refusal ?? page.disk.problem;
  return <span class={page.is_ready && !problem ? "state good" : "state bad"}>{problem ?? page.phase}</span>;
}

function About({ page }: { page: ServerPage }) {
  return (
    <p class="note">
      Version {page.version}, started {ago(page.started_at, page.now)}, {dateTime(page.started_at)}
    </p>
  );
}

function Tenants({ page }: { page: ServerPage }) {
  return (
    <Wide label="Tenants">
      <h2>
        Tenants <small>in the last {Math.round(page.window_seconds / 60)} min</small>
      </h2>
      {page.tenants.length === 0 && <p class="empty">Nobody has sent a request.</p>}
      {page.tenants.length > 0 && (
        <table class="rows">
          <Head
            names={[
              "Owner",
              "Share of device time",
              "Waiting",
              "Running",
              "Oldest",
              "Median wait",
              "Longest wait",
              "Finished",
              "Tokens",
            ]}
            numbers={[
              "Share of device time",
              "Waiting",
              "Running",
              "Oldest",
              "Median wait",
              "Longest wait",
              "Finished",
              "Tokens",
            ]}
          />
          <tbody>
            {page.tenants.map((tenant) => (
              <tr key={tenant.owner}>
                <th scope="row">{tenant.owner}</th>
                <td class="number">
                  <Share part={tenant.device_share} />
                </td>
                <td class="number">{number(tenant.waiting)}</td>
                <td class="number">{number(tenant.running)}</td>
                <td class="number">{tenant.oldest_seconds === null ? "–" : span(tenant.oldest_seconds)}</td>
                <td class="number">{tenant.wait_median === null ? "–" : span(tenant.wait_median)}</td>
                <td class="number">{tenant.wait_most === null ? "–" : span(tenant.wait_most)}</td>
                <td class="number">{number(tenant.finished)}</td>
                <td class="number">{number(tenant.tokens)}</td>
              </tr>
            ))}
          </tbody>
        </table>
      )}
    </Wide>
  );
}

/** What is not finished. While the server ends, it is what is still carried out. */
function Queue({ page }: { page: ServerPage }) {
  const what = page.refusal
    ? "what the server still tries to finish before it ends; the next start continues the rest"
    : "requests that are not finished, the oldest first";
  return (
    <Wide label="Queue">
      <h2>
        {page.refusal ? "Draining" : "Queue"} <small>{what}</small>
      </h2>
      {page.queue.length === 0 && <p class="empty">There are none.</p>}
      {page.queue.length > 0 && (
        <table class="rows">
          <Head names={["Request", "Owner", "Run or sampler", "Age", "State"]} numbers={["Age"]} />
          <tbody>
            {page.queue.map((each) => (
              <tr key={each.id}>
                <th scope="row">
                  {each.kind} <small>{each.id.slice(0, 8)}</small>
                </th>
                <td>{each.owner}</td>
                <td>
                  <Line line={each.line} />
                </td>
                <td class="number">{span(each.seconds)}</td>
                <td>
                  {each.is_running ? "running" : "waiting"}
                  {each.reason && `: ${each.reason}`}
                </td>
              </tr>
            ))}
          </tbody>
        </table>
      )}
      {page.queue_length > page.queue.length && (
        <p class="note">and {number(page.queue_length - page.queue.length)} younger ones</p>
      )}
    </Wide>
  );
}

/** A run as a link; a sampler has no page. */
function Line({ line }: { line: string }) {
  const short = shortId(line);
  return line.includes(":train:") ? (
    <a href={address(url`/runs/${line}`)} title={line}>
      {short}
    </a>
  ) : (
    <span title={line}>{line.includes(":") ? short : line}</span>
  );
}

function Work({ page }: { page: ServerPage }) {
  const rate = (value: number) => `${number(Math.round(value))} per second`;
  return (
    <section>
      <h2>Throughput</h2>
      <div class="charts three">
        <Columns name="Training tokens" values={page.throughput.map((slice) => slice.trained)} show={rate} />
        <Columns name="Prompt and answer tokens" values={page.throughput.map((slice) => slice.sampled)} show={rate} />
        <Columns
          name={page.groups.length > 1 ? "Devices in use, all groups together" : "Devices in use"}
          values={page.throughput.map((slice) => slice.busy)}
          show={(value) => percent(value, 1)}
          most={1}
        />
      </div>
    </section>
  );
}

function Disk({ page: { disk } }: { page: ServerPage }) {
  const kinds = Object.entries(disk.bytes_by_kind)
    .filter(([, size]) => size > 0)
    .sort((a, b) => b[1] - a[1]);
  const used = kinds.reduce((sum, [, size]) => sum + size, 0);
  return (
    <section>
      <h2>
        Data directory{" "}
        <small>
          {kinds.length > 0 && `${bytes(used)} used, measured every 5 min; `}
          {disk.free_bytes === null ? "" : `${bytes(disk.free_bytes)} free`}
        </small>
      </h2>
      {kinds.length === 0 && <p class="empty">Its size has not been measured yet.</p>}
      {kinds.length > 0 && (
        <Parts
          label="Data directory"
          whole={used}
          show={bytes}
          parts={kinds.map(([kind, size]) => ({ name: kind.replaceAll("_", " "), size }))}
        />
      )}
    </section>
  );
}

function Suspects({ page }: { page: ServerPage }) {
  return (
    <Wide label="Quarantine">
      <h2>
        Quarantine <small>requests that may have ended workers or the server, or were given up</small>
      </h2>
      {page.suspects.length === 0 && <p class="empty">There are none.</p>}
      {page.suspects.length > 0 && (
        <table class="rows">
          <Head
            names={["Request", "Owner", "Run or sampler", "Workers ended", "Servers ended", "State"]}
            numbers={["Workers ended", "Servers ended"]}
          />
          <tbody>
            {page.suspects.map((each) => (
              <tr key={each.id}>
                <th scope="row">
                  {each.kind} <small>{each.id.slice(0, 8)}</small>
                </th>
                <td>{each.owner}</td>
                <td>
                  <Line line={each.line} />
                </td>
                <td class="number">{each.losses}</td>
                <td class="number">{each.coordinator_losses}</td>
                <td>
                  {each.state}
                  {each.reason && `: ${each.reason}`}
                </td>
              </tr>
            ))}
          </tbody>
        </table>
      )}
    </Wide>
  );
}
