// Puts the turns of a tree into lanes, as a graph of versions does: a path stays in its lane, a branch gets another.
import type { TurnEntry } from "../api_types";

export const MOST_LANES = 12; // branches beyond them share the last, without lines
const COLORS = 8;

export interface Line {
  lane: number;
  color: number;
  from: "above" | "here";
  to: "below" | "here";
}

/** One row of the graph: the turn's dot, and the lines that pass it. */
export interface GraphRow {
  lane: number;
  color: number; // of the root
  lines: Line[];
  arms: { lane: number; color: number }[]; // lanes that begin at this turn, beside it
}

interface Chain {
  rows: number[]; // of turns that go on from each other
  start: number; // where its lane begins: at the turn that it branches from, or at its first
  parent: number | null;
  color: number;
  lane: number;
}

/** The graph of turns in the order of their acceptance. */
export function graph(turns: Pick<TurnEntry, "id" | "parent">[]): GraphRow[] {
  const chains = chainsOf(turns);
  assignLanes(chains);
  const rows: GraphRow[] = turns.map(() => ({ lane: 0, color: 0, lines: [], arms: [] }));
  for (const { rows: own, start, parent, color, lane } of chains) {
    for (const row of own) Object.assign(rows[row]!, { lane, color });
    if (lane === MOST_LANES - 1) continue;
    if (parent !== null) rows[parent]!.arms.push({ lane, color });
    const end = own.at(-1)!;
    for (let row = start; row <= end && start < end; row++)
      rows[row]!.lines.push({
        lane,
        color,
        from: row === start ? "here" : "above",
        to: row === end ? "here" : "below",
      });
  }
  return rows;
}

/** How many lanes a graph has. */
export function width(rows: GraphRow[]): number {
  return 1 + Math.max(0, ...rows.map(({ lane }) => lane));
}

function chainsOf(turns: Pick<TurnEntry, "id" | "parent">[]): Chain[] {
  const rowOf = new Map(turns.map(({ id }, row) => [id, row]));
  const chainAt: Chain[] = [];
  const chains: Chain[] = [];
  let roots = 0;
  turns.forEach(({ parent: id }, row) => {
    const parent = id === null ? undefined : rowOf.get(id);
    const before = parent === undefined ? undefined : chainAt[parent];
    if (before && before.rows.at(-1) === parent) {
      before.rows.push(row);
      chainAt[row] = before;
      return;
    }
    const chain = {
      rows: [row],
      start: parent ?? row,
      parent: parent ?? null,
      color: before ? before.color : roots++ % COLORS,
      lane: 0,
    };
    chains.push(chain);
    chainAt[row] = chain;
  });
  return chains;
}

/** Gives each chain the first lane that is free as long as it lasts. */
function assignLanes(chains: Chain[]): void {
  const taken: [number, number][][] = [];
  for (const chain of chains) {
    const end = chain.rows.at(-1)!;
    const isFree = (spans: [number, number][]) => spans.every(([from, to]) => end < from || to < chain.start);
    let lane = taken.findIndex((spans) => isFree(spans));
    if (lane < 0) lane = Math.min(taken.length, MOST_LANES - 1);
    if (lane < MOST_LANES - 1) taken[lane] = [...(taken[lane] ?? []), [chain.start, end]];
    chain.lane = lane;
  }
}
