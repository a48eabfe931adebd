// Numbers and times as people read them.

export function number(value: number | null | undefined): string {
  if (value === null || value === undefined) return "–";
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-3 || size >= 1e7)) return minus(value.toExponential(2));
  if (Number.isInteger(value)) return minus(value.toLocaleString("en"));
  return minus(size >= 1000 ? Math.round(value).toLocaleString("en") : value.toPrecision(4));
}

/** A number whose sign says which way it goes. */
export function signed(value: number | null | undefined): string {
  return value != null && value > 0 ? `+${number(value)}` : number(value);
}

/** A number with true minus signs. */
export function minus(text: string): string {
  return text.replaceAll("-", "−");
}

/** A number of things: 1 step, 2 steps. */
export function count(things: number, one: string): string {
  return `${number(things)} ${one}${things === 1 ? "" : "s"}`;
}

/** A mark of an axis, with as many decimals as the marks beside it. */
export function mark(value: number, decimals: number): string {
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (size < 1e-3 || size >= 1e5) return minus(value.toExponential(1));
  const digits = Math.min(6, decimals);
  return minus(value.toLocaleString("en", { minimumFractionDigits: digits, maximumFractionDigits: digits }));
}

/** How many decimals the longest of some marks needs: two for 0, 0.25 and 0.5. */
export function decimals(marks: number[]): number {
  return Math.max(...marks.map((value) => (String(Number(value.toPrecision(8))).split(".")[1] ?? "").length));
}

export function ago(at: number | null, now = Date.now() / 1000): string {
  if (at === null) return "–";
  const seconds = Math.max(0, now - at);
  return seconds < 5 ? "now" : `${duration(seconds)} ago`;
}

export function duration(seconds: number): string {
  for (const [size, unit] of [
    [86400, "d"],
    [3600, "h"],
    [60, "min"],
  ] as const) {
    if (seconds >= size) return `${(seconds / size).toFixed(seconds < 10 * size ? 1 : 0).replace(".0", "")} ${unit}`;
  }
  return `${Math.round(seconds)} s`;
}

/** A span that may be short: 12 ms, 3.4 s, 2.5 min. */
export function span(seconds: number): string {
  if (seconds < 0.9995) return `${Math.round(1000 * seconds)} ms`;
  return seconds < 60 ? `${seconds.toFixed(1)} s` : duration(seconds);
}

export function bytes(size: number): string {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  const unit = Math.min(units.length - 1, size < 1 ? 0 : Math.floor(Math.log2(size) / 10));
  const value = size / 1024 ** unit;
  return `${unit === 0 || value >= 100 ? Math.round(value) : value.toFixed(1)} ${units[unit]}`;
}

export function percent(part: number, whole: number): string {
  return `${Math.round((100 * part) / (whole || 1))} %`;
}

export function dateTime(at: number): string {
  return new Date(at * 1000).toLocaleString("sv").slice(0, 16);
}

/** The text before the last slash is the same for most models; what follows tells them apart. */
export function shortName(name: string): string {
  return name.slice(name.lastIndexOf("/") + 1);
}
