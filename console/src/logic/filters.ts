// What a list shows while something is typed into the field above it.

/** Whether a text has each word of a filter in it, in any order; capitals count as small letters. */
export function fits(filter: string, text: string): boolean {
  const known = text.toLowerCase();
  return filter
    .toLowerCase()
    .split(/\s+/)
    .every((word) => known.includes(word));
}
