// Numbers and times as people read them.

export function number(value: number | null | undefined): string {
  if (value === null || value === undefined) return "–";
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-3 || size >= 1e7)) return value.toExponential(2);
  if (Number.isInteger(value)) return value.toLocaleString("en");
  return size >= 1000 ? Math.round(value).toLocaleString("en") : value.toPrecision(4);
}

export function ago(at: number | null, now = Date.now() / 1000): string {
  if (at === null) return "–";
  const seconds = Math.max(0, now - at);
  return seconds < 5 ? "now" : `${duration(seconds)} ago`;
}

export function duration(seconds: number): string {
  for (const [size, unit] of [[86400, "d"], [3600, "h"], [60, "min"]] as const) {
    if (seconds >= size) return `${(seconds / size).toFixed(seconds < 10 * size ? 1 : 0)} ${unit}`;
  }
  return `${Math.round(seconds)} s`;
}

export function dateTime(at: number): string {
  return new Date(at * 1000).toLocaleString("sv").slice(0, 16);
}

/** The text before the last slash is the same for most models; what follows tells them apart. */
export function shortName(name: string): string {
  return name.slice(name.lastIndexOf("/") + 1);
}
