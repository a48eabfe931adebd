// The samples of one prompt side by side, token by token.
import { useEffect, useState } from "preact/hooks";
import { Alternatives } from "../alternatives";
import { caller, getSampleGroup } from "../api";
import type { SampleGroup as Group, SampleOfGroup } from "../api_types";
import { url } from "../logic/addresses";
import { number, signed } from "../logic/format";
import { nats, type Alternative } from "../logic/logprobs";
import { ENDS, inOrder, ORDERS, weightsName, type GroupOrder } from "../logic/samples";
import { alternatives } from "../openai";
import { Choice, Loading, Problem } from "../parts";
import { address, place, remember } from "../router";
import { RunHeader, useRun } from "../run_header";
import { BorderChoice, Legend, Tokens, Unlikeliest } from "../tokens";

export function SampleGroup({ id, request }: { id: string; request: string }) {
  const run = useRun(id);
  const [group, setGroup] = useState<Group | null>(null);
  const [error, setError] = useState<string | null>(null);
  useEffect(
    () => void getSampleGroup(id, request).then(setGroup, (refused: Error) => setError(refused.message)),
    [id, request],
  );
  return (
    <>
      <RunHeader id={id} run={run} />
      {error && (
        <p class="problem" role="alert">
          {error} <a href={address(url`/runs/${id}/samples`)}>See all samples.</a>
        </p>
      )}
      {!group && !error && <Loading />}
      {group && <Shown group={group} images={url`/console/api/runs/${id}/samples/${request}/images/`} />}
    </>
  );
}

/** `images` is the address before the number of an image. */
function Shown({ group, images }: { group: Group; images: string }) {
  const [order, setOrder] = useState<GroupOrder>(
    ORDERS.find(([name]) => name === place.value.query.get("order"))?.[0] ?? "drawn",
  );
  const [hasBorders, setBorders] = useState(false);
  const choose = (chosen: GroupOrder) => {
    setOrder(chosen);
    remember({ order: chosen === "drawn" ? "" : chosen });
  };
  const settings: [string, string][] = [
    ["Weights", weightsName(group)],
    ["Temperature", String(group.temperature)],
    ...(group.top_p < 1 ? [["Top p", String(group.top_p)] as [string, string]] : []),
    ...(group.top_k > 0 ? [["Top k", String(group.top_k)] as [string, string]] : []),
    ["Max tokens", group.max_tokens === null ? "the context" : number(group.max_tokens)],
    ["Samples", number(group.samples.length + group.left_out)],
  ];
  return (
    <>
      <dl class="facts">
        {settings.map(([name, value]) => (
          <div key={name}>
            <dt>{name}</dt>
            <dd>{value}</dd>
          </div>
        ))}
      </dl>
      {group.errors.map((error) => (
        <p key={error} class="problem">
          {error}
        </p>
      ))}
      <h2>
        Prompt <small>{number(group.prompt.tokens.length + group.prompt.left_out)} tokens</small>
      </h2>
      <Tokens content={group.prompt} hasBorders={hasBorders} />
      {group.images.length > 0 && (
        <div class="prompt-images">
          {group.images.map((image) => (
            <figure key={image.number}>
              <img
                src={`${images}${image.number}`}
                alt={`What the prompt shows, number ${image.number + 1}`}
                loading="lazy"
              />
              <figcaption class="note">
                {image.width} × {image.height} pixels, {number(image.tokens)} tokens
              </figcaption>
            </figure>
          ))}
        </div>
      )}
      <h2>
        Samples <small>log-probability of each token, in nats</small>
      </h2>
      <div class="bar">
        <Choice legend="Order" name="order" options={ORDERS} value={order} choose={choose} />
        <BorderChoice hasBorders={hasBorders} choose={setBorders} />
        <Legend />
      </div>
      <div class="side-by-side">
        {inOrder(group.samples, order).map(([each, number]) => (
          <One
            key={`${each.request_id} ${each.place}`}
            group={group}
            sample={each}
            number={number}
            hasBorders={hasBorders}
          />
        ))}
      </div>
      {group.left_out > 0 && <p class="note">and {number(group.left_out)} more</p>}
      {group.not_read > 0 && (
        <p class="note">
          {number(group.not_read)} requests that may have the same prompt were not looked at, since they are long.
        </p>
      )}
    </>
  );
}

interface OneProps {
  group: Group;
  sample: SampleOfGroup;
  number: number;
  hasBorders: boolean;
}

function One({ group, sample, number: place, hasBorders }: OneProps) {
  const { content } = sample;
  const tokens = number(content.tokens.length + content.left_out);
  const [known, setKnown] = useState<Alternative[][] | null>(null);
  const [chosen, setChosen] = useState(0);
  const [isAsking, setAsking] = useState(false);
  const [error, setError] = useState<string | null>(null);
  const ask = async () => {
    setAsking(true);
    setError(null);
    try {
      setKnown(await alternatives(group.model, group.prompt.tokens, content.tokens));
    } catch (refused) {
      setError((refused as Error).message);
    }
    setAsking(false);
  };
  return (
    <section aria-label={`Sample ${place}`}>
      <h3>
        {place}. {sample.advantage !== null && <strong>advantage {signed(sample.advantage)}, </strong>}
        {tokens} tokens, mean {nats(sample.mean_logprob)}, ended by {ENDS[sample.stop_reason]}
      </h3>
      <Tokens content={content} hasBorders={hasBorders} choice={known ? { chosen, choose: setChosen } : undefined} />
      <Unlikeliest content={content} />
      {known && (
        <>
          <p class="note">Click a token, or go through them with ← and →.</p>
          <Alternatives drawn={content.texts[chosen]!} known={known[chosen] ?? []} />
        </>
      )}
      {!known && canBeScored(group, sample) && (
        <button
          type="button"
          disabled={isAsking}
          title="Scores the prompt and this sample with the same weights; that counts as use of your key"
          onClick={() => void ask()}
        >
          {isAsking ? "Scoring …" : "Alternatives of each token"}
        </button>
      )}
      <Problem text={error} />
      {error && group.weights?.startsWith("tinker://") === false && (
        <p class="note">
          Weights without a name are there as long as their session is open. Those of{" "}
          <code>save_weights_for_sampler</code> with a name stay.
        </p>
      )}
    </section>
  );
}

/** Whether all tokens are here, none of them is an image's, and the caller may use the model. */
function canBeScored(group: Group, { content }: SampleOfGroup): boolean {
  const isWhole = group.prompt.left_out === 0 && content.left_out === 0 && content.tokens.length > 0;
  return isWhole && group.images.length === 0 && !caller.value?.is_read_only;
}
