// Samples: which belong together, what made them, and which piece of a text is whose token.
import type { SampledRequest, SampleOfGroup } from "../api_types";
import { count } from "./format";

/** Puts requests of one prompt to one sampler together, where the first of them is. */
export function grouped(requests: SampledRequest[]): SampledRequest[][] {
  const byGroup = new Map<string, SampledRequest[]>();
  for (const each of requests) byGroup.set(each.group, [...(byGroup.get(each.group) ?? []), each]);
  return [...byGroup.values()];
}

export function weightsName({ weights, steps }: Pick<SampledRequest, "weights" | "steps">): string {
  const name = weights === null ? "base model" : weights.replace(/^tinker:\/\/.*\//, "checkpoint ");
  return steps === null ? name : `${name}, after ${count(steps, "step")}`;
}

/** What ended an answer. */
export const ENDS = { stop: "stop sequence", length: "max tokens" } as const;

export const LIST_ORDERS = [
  ["newest", "newest first"],
  ["highest", "highest advantage first"],
  ["lowest", "lowest advantage first"],
] as const;
export type SampleOrder = (typeof LIST_ORDERS)[number][0];

export function listOrder(name: string | null): SampleOrder {
  return LIST_ORDERS.find(([known]) => known === name)?.[0] ?? "newest";
}

export const ORDERS = [
  ["drawn", "as drawn"],
  ["advantage", "best first"],
  ["likely", "likeliest first"],
] as const;
export type GroupOrder = (typeof ORDERS)[number][0];

/** The samples with their numbers, which count as they were drawn. What is not known comes last. */
export function inOrder(samples: SampleOfGroup[], order: GroupOrder): [SampleOfGroup, number][] {
  const numbered = samples.map((sample, i): [SampleOfGroup, number] => [sample, i + 1]);
  if (order === "drawn") return numbered;
  const value = ({ advantage, mean_logprob }: SampleOfGroup) =>
    (order === "advantage" ? advantage : mean_logprob) ?? -Infinity;
  return numbered.sort(([a], [b]) => (value(a) === value(b) ? 0 : value(b) - value(a)));
}

const HALF = "\ufffd";

/** Cuts a text into those of its tokens. Special tokens have none; a character of several tokens is the last one's. */
export function align(text: string, tokens: string[]): string[] {
  let at = 0;
  return tokens.map((token, i) => {
    if (!token.includes(HALF)) {
      if (!text.startsWith(token, at)) return "";
      at += token.length;
      return token;
    }
    const next = tokens[i + 1];
    if (next?.includes(HALF)) return "";
    const end = next ? text.indexOf(next, at) : text.length;
    const piece = text.slice(at, end < 0 ? text.length : end);
    at += piece.length;
    return piece;
  });
}
