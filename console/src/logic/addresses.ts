// How addresses are written and read. Everything that is filled in is encoded, as a name may hold anything.

type Text = string | number;

/** Writes an address as in url`/runs/${id}`. */
export function url(fixed: TemplateStringsArray, ...names: Text[]): string {
  return String.raw({ raw: fixed }, ...names.map(encodeURIComponent));
}

/** What a route has in braces, and its query; what is null or undefined is left out, a list is many. */
export interface Parameters {
  path?: Record<string, Text>;
  query?: Record<string, Text | Text[] | null | undefined>;
}

/** Fills in a route such as /runs/{id}. */
export function filled(route: string, { path = {}, query = {} }: Parameters = {}): string {
  const address = route.replace(/\{(\w+)\}/g, (_, name: string) => encodeURIComponent(path[name]!));
  const given = Object.entries(query).flatMap(([name, value]) =>
    [value ?? []].flat().map((each) => [name, String(each)]),
  );
  return given.length ? `${address}?${new URLSearchParams(given)}` : address;
}

/** A part of an address as text; one that the console did not make may not be encoded properly, and stays. */
export function decoded(part: string): string {
  try {
    return decodeURIComponent(part);
  } catch {
    return part;
  }
}
