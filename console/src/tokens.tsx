// Text whose tokens are coloured by how unlikely they were, with what the colours mean.
import type { TokenTexts } from "./api";

type Content = Omit<TokenTexts, "tokens"> & { tokens: (number | string)[] };

// Log-probabilities, in nats, below which a token has the next colour.
const BOUNDS = [-0.1, -0.5, -1, -2, -4];
const UNLIKELIEST = 5;

export function level(logprob: number | null): number {
  return logprob === null ? 0 : BOUNDS.filter((bound) => logprob < bound).length;
}

/** A log-probability as text, with a true minus sign. */
export function nats(logprob: number | null): string {
  return logprob === null ? "–" : logprob.toFixed(2).replace("-", "−");
}

function probability(logprob: number): string {
  const percent = 100 * Math.exp(logprob);
  return `${percent >= 1 ? Math.round(percent) : percent.toPrecision(1)} %`;
}

export function Tokens({ content }: { content: Content }) {
  const { texts, tokens, logprobs, left_out, left_out_at } = content;
  const cut = left_out > 0 && <em class="cut"> … {left_out.toLocaleString("en")} tokens left out … </em>;
  return (
    <pre class="tokens" tabIndex={0}>
      {texts.map((text, i) => {
        const logprob = logprobs?.[i] ?? null;
        const said = logprob === null ? "" : `: ${nats(logprob)} (${probability(logprob)})`;
        return (
          <>
            {i === left_out_at && cut}
            <span class={logprob === null ? undefined : `lp-${level(logprob)}`} title={`token ${tokens[i]}${said}`}>{logprobs ? text.replaceAll("\n", "↵\n") : text}</span>
          </>
        );
      })}
      {left_out_at === texts.length && cut}
    </pre>
  );
}

/** The least likely tokens in words, for those who cannot see colours. */
export function Unlikeliest({ content }: { content: TokenTexts }) {
  const known = content.texts.map((text, i) => ({ text, logprob: content.logprobs?.[i] ?? 0 }));
  const least = known.filter(({ text, logprob }) => text && level(logprob) > 2).sort((a, b) => a.logprob - b.logprob);
  if (!least.length) return null;
  return (
    <p class="note">
      Least likely: {least.slice(0, UNLIKELIEST).map(({ text, logprob }, i) => <>{i > 0 && ", "}<code>{JSON.stringify(text).slice(1, -1)}</code> {nats(logprob)}</>)}
    </p>
  );
}

export function Legend() {
  const names = [`above ${nats(BOUNDS[0]!)}`, ...BOUNDS.map((bound, i) => (i + 1 < BOUNDS.length ? `${nats(bound)} to ${nats(BOUNDS[i + 1]!)}` : `below ${nats(bound)}`))];
  return (
    <ul class="legend" aria-label="Log-probability of a token, in nats">
      {names.map((name, i) => <li key={name}><i class={`key lp-${i}`} />{name}</li>)}
    </ul>
  );
}
