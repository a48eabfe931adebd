// A share as a small bar with its number.
import { percent } from "./logic/format";

export function Share({ part }: { part: number }) {
  return (
    <>
      <svg class="meter" viewBox="0 0 100 6" preserveAspectRatio="none" aria-hidden="true">
        <rect class="p-rest" width="100" height="6" />
        <rect class="p-0" width={100 * part} height="6" />
      </svg>
      <span class="value">{percent(part, 1)}</span>
    </>
  );
}
