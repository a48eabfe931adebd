// Parts of a whole, side by side in one bar.

/** Where each part begins, and how long it is, in a bar of a length. */
export function stacked(sizes: number[], whole: number, length: number): { x: number; width: number }[] {
  let x = 0;
  return sizes.map((size) => {
    const part = { x, width: whole ? (length * size) / whole : 0 };
    x += part.width;
    return part;
  });
}
