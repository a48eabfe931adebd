// What a run has sampled, newest first: prompts and answers as text, to be searched.
import { useEffect, useState } from "preact/hooks";
import { type CurvePoint, listSamples, type SampleChoice } from "../api";
import type { Excerpt, SampledRequest } from "../api_types";
import { poll } from "../live";
import { url } from "../logic/addresses";
import { ago, dateTime, duration, number, signed } from "../logic/format";
import { level, nats } from "../logic/logprobs";
import { ENDS, grouped, LIST_ORDERS, listOrder, weightsName, type SampleOrder } from "../logic/samples";
import { metricTitle } from "../logic/series";
import { Choice, Head, Loading, Problem } from "../parts";
import { address, place, remember } from "../router";
import { RunHeader, useRun } from "../run_header";

const POLL_SECONDS = 5;

interface Listing {
  requests: SampledRequest[];
  lookedAt: number;
  next: number | null; // where the next page begins
  pages: number;
  keptHours: number;
}

export function Samples({ id }: { id: string }) {
  const { query } = place.value;
  const choice: SampleChoice = {
    search: query.get("search") ?? "",
    point: curvePoint(query),
    prompt_of: query.get("prompt_of"),
    order: listOrder(query.get("order")),
  };
  // A link may lead to other samples.
  return <Found key={JSON.stringify(choice)} id={id} initial={choice} />;
}

function curvePoint(query: URLSearchParams): CurvePoint | null {
  const metric = query.get("metric");
  const x = Number(query.get("x") ?? Number.NaN);
  return metric === null || Number.isNaN(x)
    ? null
    : { metric, x, axis: query.get("axis") === "time" ? "time" : "step" };
}

function Found({ id, initial }: { id: string; initial: SampleChoice }) {
  const run = useRun(id);
  const [choice, setChoice] = useState(initial);
  const { search, point, prompt_of, order } = choice;
  const [typed, setTyped] = useState(search);
  const [listing, setListing] = useState<Listing | null>(null);
  const [isBusy, setBusy] = useState(false);
  const [error, setError] = useState<string | null>(null);

  const load = async (known: Listing | null) => {
    setBusy(known !== null || search !== "");
    try {
      const page = await listSamples(id, choice, known?.next ?? null);
      setListing({
        requests: [...(known?.requests ?? []), ...page.requests],
        lookedAt: (known?.lookedAt ?? 0) + page.looked_at,
        next: page.next_start,
        pages: (known?.pages ?? 0) + 1,
        keptHours: page.kept_hours,
      });
      setError(null);
    } catch (refused) {
      setError((refused as Error).message);
    }
    setBusy(false);
  };
  const isChosen = search !== "" || point !== null || prompt_of !== null || order !== "newest";
  const isFollowing = !isChosen && (listing?.pages ?? 1) === 1;
  useEffect(() => {
    if (isFollowing) return poll(() => load(null), POLL_SECONDS);
    if (isChosen) void load(null);
  }, [id, choice, isFollowing]);

  const first = order === "newest" ? "newest" : "first";
  const change = (news: Partial<SampleChoice>) => {
    setListing(null);
    setChoice({ ...choice, ...news });
  };
  const choose = (chosen: SampleOrder) => {
    remember({ order: chosen === "newest" ? "" : chosen });
    change({ order: chosen });
  };
  const submit = (event: Event) => {
    event.preventDefault();
    remember({ search: typed.trim() });
    change({ search: typed.trim() });
  };
  return (
    <>
      <RunHeader id={id} run={run} />
      <form class="bar" role="search" onSubmit={submit}>
        <input
          type="search"
          placeholder="Search prompts and answers"
          aria-label="Search prompts and answers"
          value={typed}
          onInput={(event) => setTyped(event.currentTarget.value)}
        />
        <button type="submit">Search</button>
        <span class="note" role="status">
          {isBusy
            ? "Searching …"
            : search && listing
              ? `${listing.requests.length} of the ${first} ${number(listing.lookedAt)} requests`
              : ""}
        </span>
        <Choice legend="Order" name="order" options={LIST_ORDERS} value={order} choose={choose} />
      </form>
      {point && (
        <p class="note">
          Samples that were asked for before {point.axis === "step" ? `step ${point.x}` : duration(point.x)} of{" "}
          {metricTitle(point.metric) ?? point.metric}. <a href={address(url`/runs/${id}/samples`)}>See all samples.</a>
        </p>
      )}
      {prompt_of !== null && (
        <p class="note">
          Samples of one prompt, from all weights of the run that have answered it.{" "}
          <a href={address(url`/runs/${id}/samples`)}>See all samples.</a>
        </p>
      )}
      <Problem text={error} />
      {!listing && !error && <Loading />}
      {listing?.requests.length === 0 && search && !isBusy && (
        <p class="empty">None of these requests has “{search}” in its prompt or its answers.</p>
      )}
      {listing?.requests.length === 0 && !search && order !== "newest" && (
        <p class="empty">
          Of no sample here is the advantage known. A client tells it with the provenance spans of its datums (
          <code>Datum.with_provenance</code>), as those of tinker-cookbook do.
        </p>
      )}
      {listing?.requests.length === 0 && !search && order === "newest" && (
        <p class="empty">
          There are no samples of this run. The server keeps them for {listing.keptHours} hours after they are finished
          (<code>--keep-results-hours</code>).
        </p>
      )}
      {listing && grouped(listing.requests).map((each) => <Group key={each[0]!.id} id={id} requests={each} />)}
      {listing?.next != null && (
        <button type="button" disabled={isBusy} onClick={() => void load(listing)}>
          {order !== "newest" ? "More samples" : search ? "Search older samples" : "Older samples"}
        </button>
      )}
    </>
  );
}

function Group({ id, requests }: { id: string; requests: SampledRequest[] }) {
  const first = requests[0]!;
  const count = requests.reduce((sum, each) => sum + each.num_samples, 0);
  const shown = requests.flatMap((each) => each.samples);
  const errors = requests.filter((each) => each.error);
  const isLearned = shown.some((each) => each.advantage !== null);
  const numbers = [...(isLearned ? ["Advantage"] : []), "Tokens", "Mean log-prob."];
  return (
    <article class="samples">
      <p class="bar">
        <span title={first.weights ?? undefined}>{weightsName(first)}</span>
        <span class="dim">temperature {first.temperature}</span>
        <span class="dim" title={dateTime(first.at)}>
          {ago(first.at)}
        </span>
        {first.prompt && (
          <a href={address(url`/runs/${id}/samples/${first.id}`)}>
            {count === 1 ? "Token by token" : `${number(count)} samples side by side`}
          </a>
        )}
        {first.prompt && (
          <a href={address(url`/runs/${id}/samples?prompt_of=${first.id}`)}>This prompt over training</a>
        )}
      </p>
      {first.prompt ? (
        <pre class="prompt" tabIndex={0}>
          <Cut excerpt={first.prompt} atEnd={false} />
        </pre>
      ) : (
        <p class="empty">This request is too large to show, or no longer kept.</p>
      )}
      {errors.map((each) => (
        <p key={each.id} class="problem">
          {each.error}
        </p>
      ))}
      {shown.length > 0 && (
        <table class="rows">
          <Head names={["Answer", ...numbers, "Ended by"]} numbers={numbers} />
          <tbody>
            {shown.map(({ excerpt, stop_reason, mean_logprob, advantage }, i) => (
              <tr key={i}>
                <td>
                  <pre tabIndex={0}>
                    <Cut excerpt={excerpt} atEnd />
                  </pre>
                </td>
                {isLearned && <td class="number">{signed(advantage)}</td>}
                <td class="number">{number(excerpt.tokens)}</td>
                <td class="number">
                  <span class={`mean lp-${level(mean_logprob)}`}>{nats(mean_logprob)}</span>
                </td>
                <td>{ENDS[stop_reason]}</td>
              </tr>
            ))}
          </tbody>
        </table>
      )}
      {count > shown.length && <p class="note">and {number(count - shown.length)} more</p>}
    </article>
  );
}

function Cut({ excerpt, atEnd }: { excerpt: Excerpt; atEnd: boolean }) {
  const dots = excerpt.is_cut && <em class="cut">…</em>;
  return (
    <>
      {!atEnd && dots}
      {excerpt.text}
      {atEnd && dots}
    </>
  );
}
