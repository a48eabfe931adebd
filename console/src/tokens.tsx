// Text whose tokens are coloured by how unlikely they were, with what the colours mean.
import type { TokenizedText } from "./api_types";
import { level, levelNames, nats, probability, unlikeliest } from "./logic/logprobs";

type Content = Omit<TokenizedText, "tokens"> & {
  tokens: (number | string)[];
  forced?: boolean[]; // by a grammar
};

/** Lets a token be chosen, with a click or with the arrow keys. */
export interface TokenChoice {
  chosen: number;
  choose: (token: number) => void;
}

interface TokensProps {
  content: Content;
  hasBorders?: boolean;
  choice?: TokenChoice | undefined;
}

export function Tokens({ content, hasBorders = false, choice }: TokensProps) {
  const { texts, tokens, logprobs, left_out, left_out_at, forced } = content;
  const cut = left_out > 0 && <em class="cut"> … {left_out.toLocaleString("en")} tokens left out … </em>;
  return (
    <pre
      class={["tokens", hasBorders && "bordered", choice && "chosen-from"].filter(Boolean).join(" ")}
      tabIndex={0}
      onClick={(event) => {
        const token = (event.target as HTMLElement).closest<HTMLElement>("[data-token]")?.dataset.token;
        if (choice && token) choice.choose(Number(token));
      }}
      onKeyDown={(event) => {
        const by = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
        if (!choice || !by) return;
        event.preventDefault();
        choice.choose(Math.min(Math.max(choice.chosen + by, 0), texts.length - 1));
      }}
    >
      {texts.map((text, i) => {
        const logprob = logprobs?.[i] ?? null;
        const likelihood = logprob === null ? "" : `: ${nats(logprob)} (${probability(logprob)})`;
        return (
          <>
            {i === left_out_at && cut}
            <span
              class={
                [logprob !== null && `lp-${level(logprob)}`, forced?.[i] && "forced", choice?.chosen === i && "chosen"]
                  .filter(Boolean)
                  .join(" ") || undefined
              }
              data-token={i}
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
