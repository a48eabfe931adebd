// Sums of what owners have used.
import type { HourOfUse, UseResponse } from "../api_types";

export const HOUR = 3600; // seconds

export type Amount = "trained" | "forwarded" | "prompt" | "cached" | "sampled";

/** Tokens of one kind in these hours. */
export function sum(hours: HourOfUse[], amount: Amount): number {
  return hours.reduce((total, each) => total + each[amount], 0);
}

/** Tokens of one kind in each hour of the window of `use`, by all owners of `hours` together. */
export function perHour(use: Pick<UseResponse, "since" | "until">, hours: HourOfUse[], amount: Amount): number[] {
  const values: number[] = Array(Math.round((use.until + 1 - use.since) / HOUR)).fill(0);
  for (const each of hours) values[(each.hour - use.since) / HOUR]! += each[amount];
  return values;
}
