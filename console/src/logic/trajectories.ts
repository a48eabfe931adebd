// Trajectories: why a turn stands where it does, which turns are shown, and what tables say of them.
import type { TrajectoryEntry, TurnEntry } from "../api_types";
import { percent, shortName } from "./format";

const CAUSES: Record<string, string> = {
  first: "first turn",
  new: "another conversation",
  retry: "the same messages again",
  tools_changed: "other tools or template variables",
  rewritten: "the chat template writes earlier turns in another way",
  stopped: "a stop string had cut off the turn before",
  stop_differs: "the chat template ends the turn before with another token",
};

/** Why a turn stands where it does; null: it is the next turn of its conversation. */
export function why(turn: Pick<TurnEntry, "cause" | "cause_message">): string | null {
  if (turn.cause === "continues") return null;
  if (turn.cause === "edited") return `message ${turn.cause_message ?? "?"} was edited`;
  return CAUSES[turn.cause] ?? turn.cause;
}

/** The part of all prompts that was in the prefix cache. */
export function cachedShare({ cached_tokens, prompt_tokens }: TrajectoryEntry): string {
  return prompt_tokens ? percent(cached_tokens, prompt_tokens) : "–";
}

/** A model as a table has it: its short name, and the checkpoint it has sampled from. */
export function modelName({ model, weights }: { model: string | null; weights: string | null }): string {
  const checkpoint = weights?.replace(/^tinker:\/\/.*\//, "") ?? null;
  const base = model === null ? null : shortName(model);
  if (base === null || base === checkpoint) return checkpoint ?? "–";
  return checkpoint === null ? base : `${base} · ${checkpoint}`;
}

export const requestOf = (turn: string) => turn.slice(0, turn.lastIndexOf(":"));

/** The turns of an outline, each request's as they were read, where they were; rewards may be newer. */
export function filledIn(outline: TurnEntry[], read: ReadonlyMap<string, TurnEntry[]>): TurnEntry[] {
  const seen = new Set<string>();
  const newest = new Map(outline.map((turn) => [turn.id, turn]));
  return outline.flatMap((turn) => {
    const request = requestOf(turn.id);
    const known = read.get(request);
    if (!known) return [turn];
    if (seen.has(request)) return [];
    seen.add(request);
    return known.map((each) => ({ ...each, reward: newest.get(each.id)?.reward ?? each.reward }));
  });
}

/** The requests of turns that are to be shown, and were not read since they changed; so many of them. */
export function unread(
  outline: TurnEntry[],
  open: ReadonlySet<string>,
  read: ReadonlyMap<string, TurnEntry[]>,
  most: number,
): string[] {
  const requests = new Set<string>();
  for (const turn of outline) {
    const request = requestOf(turn.id);
    if (open.has(request) && read.get(request)?.[0]?.state !== turn.state) requests.add(request);
  }
  return [...requests].slice(0, most);
}

export interface CutText {
  text: string;
  left: number; // characters that are left out
}

/** The beginning of a text that is too long to be read. */
export function cut(text: string, most: number): CutText {
  return text.length <= most ? { text, left: 0 } : { text: text.slice(0, most), left: text.length - most };
}

/** Tokens as a page shows them: the first and the last ones of many. */
export function shownTokens(
  { tokens: texts = [], logprobs = [], forced = [] }: Pick<TurnEntry, "tokens" | "logprobs" | "forced">,
  first: number,
  last: number,
) {
  const left_out = Math.max(0, texts.length - first - last);
  const part = <Each>(all: Each[]) => (left_out ? [...all.slice(0, first), ...all.slice(-last)] : all);
  const shown = part(texts);
  return {
    tokens: shown.map((text) => JSON.stringify(text)),
    texts: shown,
    logprobs: part(logprobs),
    forced: part(forced),
    left_out,
    left_out_at: left_out ? first : 0,
  };
}
