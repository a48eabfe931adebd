// The samples of one prompt side by side, token by token.
import { useEffect, useState } from "preact/hooks";
import { getSampleGroup, type Sample, type SampleGroup as Facts } from "../api";
import { number } from "../format";
import { Loading } from "../parts";
import { address, url } from "../router";
import { RunHeader, useRun } from "../run_header";
import { Legend, nats, Tokens, Unlikeliest } from "../tokens";
import { weightsName } from "./samples";

export function SampleGroup({ id, request }: { id: string; request: string }) {
  const run = useRun(id);
  const [facts, setFacts] = useState<Facts | null>(null);
  const [error, setError] = useState<string | null>(null);
  useEffect(() => void getSampleGroup(id, request).then(setFacts, (refused: Error) => setError(refused.message)), [id, request]);
  return (
    <>
      <RunHeader id={id} run={run} />
      {error && <p class="problem" role="alert">{error} <a href={address(url`/runs/${id}/samples`)}>See all samples.</a></p>}
      {!facts && !error && <Loading />}
      {facts && <Shown facts={facts} />}
    </>
  );
}

function Shown({ facts }: { facts: Facts }) {
  const settings: [string, string][] = [
    ["Weights", weightsName(facts)],
    ["Temperature", String(facts.temperature)],
    ...(facts.top_p < 1 ? [["Top p", String(facts.top_p)] as [string, string]] : []),
    ...(facts.top_k > 0 ? [["Top k", String(facts.top_k)] as [string, string]] : []),
    ["Max tokens", facts.max_tokens === null ? "the context" : number(facts.max_tokens)],
    ["Samples", number(facts.samples.length + facts.left_out)],
  ];
  return (
    <>
      <dl class="facts">{settings.map(([name, value]) => <div key={name}><dt>{name}</dt><dd>{value}</dd></div>)}</dl>
      {facts.errors.map((error) => <p key={error} class="problem">{error}</p>)}
      <h2>Prompt <small>{number(facts.prompt.tokens.length + facts.prompt.left_out)} tokens</small></h2>
      <Tokens content={facts.prompt} />
      <h2>Samples <small>log-probability of each token, in nats</small></h2>
      <Legend />
      <div class="side-by-side">{facts.samples.map((each, i) => <One key={`${each.request_id} ${each.place}`} sample={each} number={i + 1} />)}</div>
      {facts.left_out > 0 && <p class="note">and {number(facts.left_out)} more</p>}
      {facts.not_read > 0 && <p class="note">{number(facts.not_read)} requests that may have the same prompt were not looked at, since they are long.</p>}
    </>
  );
}

function One({ sample, number: place }: { sample: Sample; number: number }) {
  const { content } = sample;
  return (
    <section aria-label={`Sample ${place}`}>
      <h3>{place}. {number(content.tokens.length + content.left_out)} tokens, mean {nats(sample.mean_logprob)}, ended by {sample.stop_reason}</h3>
      <Tokens content={content} />
      <Unlikeliest content={content} />
    </section>
  );
}
