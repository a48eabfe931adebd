// Text whose tokens are coloured by how unlikely they were, with what the colours mean.
import type { TokenizedText } from "./api_types";
import { level, levelNames, nats, probability, unlikeliest } from "./logic/logprobs";

type Content = Omit<TokenizedText, "tokens"> & {
  tokens: (number | string)[];
  forced?: boolean[]; // by a grammar
};

export function Tokens({ content, hasBorders = false }: { content: Content; hasBorders?: boolean }) {
  const { texts, tokens, logprobs, left_out, left_out_at, forced } = content;
  const cut = left_out > 0 && <em class="cut"> … {left_out.toLocaleString("en")} tokens left out … </em>;
  return (
    <pre class={hasBorders ? "tokens bordered" : "tokens"} tabIndex={0}>
      {texts.map((text, i) => {
        const logprob = logprobs?.[i] ?? null;
        const likelihood = logprob === null ? "" : `: ${nats(logprob)} (${probability(logprob)})`;
        return (
          <>
            {i === left_out_at && cut}
            <span
              class={logprob === null ? undefined : `lp-${level(logprob)}${forced?.[i] ? " forced" : ""}`}
              title={`token ${tokens[i]}${likelihood}${forced?.[i] ? ", forced by a grammar" : ""}`}
            >
              {logprobs ? text.replaceAll("\n", "↵\n") : text}
            </span>
          </>
        );
      })}
      {left_out_at === texts.length && cut}
    </pre>
  );
}

/** Lets the borders of tokens be shown. */
export function BorderChoice({ hasBorders, choose }: { hasBorders: boolean; choose: (hasBorders: boolean) => void }) {
  return (
    <label class="check">
      <input type="checkbox" checked={hasBorders} onChange={(event) => choose(event.currentTarget.checked)} /> Show
      where tokens begin
    </label>
  );
}

/** The least likely tokens in words, for those who cannot see colours. */
export function Unlikeliest({ content }: { content: TokenizedText }) {
  const least = unlikeliest(content);
  if (!least.length) return null;
  return (
    <p class="note">
      Least likely:{" "}
      {least.map(({ text, logprob }, i) => (
        <>
          {i > 0 && ", "}
          <code>{JSON.stringify(text).slice(1, -1)}</code> {nats(logprob)}
        </>
      ))}
    </p>
  );
}

export function Legend() {
  return (
    <ul class="legend" aria-label="Log-probability of a token, in nats">
      {levelNames().map((name, i) => (
        <li key={name}>
          <i class={`key lp-${i}`} />
          {name}
        </li>
      ))}
    </ul>
  );
}
