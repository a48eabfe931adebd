// Log-probabilities of tokens, in nats: their colours, and how they are written.
import type { TokenizedText } from "../api_types";
import { minus } from "./format";

export const BOUNDS = [-0.1, -0.5, -1, -2, -4]; // below each of which a token has the next colour
const NOTABLE_LEVEL = 3;
const MOST_NOTABLE = 5;

/** The number of the colour: 0 for likely tokens, 5 for the unlikeliest. */
export function level(logprob: number | null): number {
  return logprob === null ? 0 : BOUNDS.filter((bound) => logprob < bound).length;
}

/** A log-probability as text, with a true minus sign. */
export function nats(logprob: number | null): string {
  return logprob === null ? "–" : minus(logprob.toFixed(2));
}

export function probability(logprob: number): string {
  const percent = 100 * Math.exp(logprob);
  return `${percent >= 1 ? Math.round(percent) : percent.toPrecision(1)} %`;
}

/** What each colour means, likely tokens first. */
export function levelNames(): string[] {
  const lower = BOUNDS.map((bound, i) =>
    i + 1 < BOUNDS.length ? `${nats(bound)} to ${nats(BOUNDS[i + 1]!)}` : `below ${nats(bound)}`,
  );
  return [`above ${nats(BOUNDS[0]!)}`, ...lower];
}

/** The least likely tokens of a text, if they are unlikely at all; the least likely first. */
export function unlikeliest({
  texts,
  logprobs,
}: Pick<TokenizedText, "texts" | "logprobs">): { text: string; logprob: number }[] {
  const tokens = texts.map((text, i) => ({ text, logprob: logprobs?.[i] ?? 0 }));
  const notable = tokens.filter(({ text, logprob }) => text && level(logprob) >= NOTABLE_LEVEL);
  return notable.sort((a, b) => a.logprob - b.logprob).slice(0, MOST_NOTABLE);
}

/** A token that might stand in a place. */
export interface Alternative {
  text: string;
  logprob: number; // nats
}

/** The tokens that are known of a place, the likeliest first; null: of none. */
export function likeliest(known: Record<string, number> | null): Alternative[] {
  const listed = Object.entries(known ?? {}).map(([text, logprob]) => ({ text, logprob }));
  return listed.sort((a, b) => b.logprob - a.logprob);
}
