// Runs as a table, with what their clients have said of them as columns, in groups if somebody wants them.
import { useState } from "preact/hooks";
import { caller } from "./api";
import type { Run } from "./api_types";
import { url } from "./logic/addresses";
import { ago, dateTime, number, shortName } from "./logic/format";
import type { Order } from "./logic/orders";
import { BY_GROUP, runGroups } from "./logic/run_groups";
import { metadataColumns, metadataText } from "./logic/run_metadata";
import { healthClass, healthHint, runName } from "./logic/runs";
import type { RunSort } from "./logic/runs";
import { headline } from "./logic/series";
import { Wide } from "./parts";
import { address } from "./router";
import { MarkedRuns, mayChange } from "./run_labels";
import { SortedHeads } from "./sorted_heads";
import type { SortedColumn } from "./sorted_heads";

interface Props {
  runs: Run[];
  order: Order<RunSort>;
  by: string; // what it is grouped by; empty: nothing
  sortBy: (sort: RunSort) => void;
  renew: (run: Run) => void;
}

export function RunTable({ runs, order, by, sortBy, renew }: Props) {
  const [ids, setIds] = useState<ReadonlySet<string>>(new Set()); // of the marked runs
  const hasOwners = caller.value?.needs_key === true && caller.value.role === "admin";
  const hasGroups = by !== BY_GROUP && runs.some((run) => run.group !== null);
  const keys = metadataColumns(runs);
  const columns: SortedColumn<RunSort>[] = [
    ["Name", null, false],
    ["State", null, false],
    ["Steps", null, true],
    ["Newest value", null, true],
    ...(hasGroups ? [["Group", "group", false] as SortedColumn<RunSort>] : []),
    ["Base model", "model", false],
    ["Rank", "rank", true],
    ...(hasOwners ? [["Owner", "owner", false] as SortedColumn<RunSort>] : []),
    ...keys.map((key): SortedColumn<RunSort> => [key, null, false]),
    ["Created", "created", false],
    ["Last changed", "changed", false],
  ];
  const mark = (id: string) => setIds(new Set(ids.has(id) ? [...ids].filter((each) => each !== id) : [...ids, id]));
  const marked = runs.filter((run) => ids.has(run.id));
  return (
    <>
      {marked.length > 0 && <MarkedRuns marked={marked} renew={renew} />}
      <Wide label="Table of runs">
        <table class="rows run-table">
          <SortedHeads columns={columns} order={order} sortBy={sortBy} />
          {(by ? runGroups(runs, by) : [{ name: "", runs }]).map((group) => (
            <tbody key={group.name}>
              {by && (
                <tr class="group-head">
                  <th scope="rowgroup" colSpan={columns.length}>
                    {group.name || "no group"} <small>{number(group.runs.length)}</small>
                  </th>
                </tr>
              )}
              {group.runs.map((run) => (
                <Row key={run.id} {...{ run, keys, hasOwners, hasGroups }} isMarked={ids.has(run.id)} mark={mark} />
              ))}
            </tbody>
          ))}
        </table>
      </Wide>
    </>
  );
}

interface RowProps {
  run: Run;
  keys: string[]; // of metadata
  hasOwners: boolean;
  hasGroups: boolean;
  isMarked: boolean;
  mark: (id: string) => void;
}

function Row({ run, keys, hasOwners, hasGroups, isMarked, mark }: RowProps) {
  const best = headline(run);
  const changed = run.last_at ?? run.created_at;
  return (
    <tr>
      <th scope="row">
        {mayChange() && (
          <input type="checkbox" aria-label={`Mark ${runName(run)}`} checked={isMarked} onChange={() => mark(run.id)} />
        )}{" "}
        <a href={address(url`/runs/${run.id}`)} title={run.id}>
          {runName(run)}
        </a>{" "}
        {run.archived_at !== null && <small>archived</small>}
      </th>
      <td class={healthClass(run.health)} title={healthHint(run.health)}>
        {run.health.state}
      </td>
      <td class="number">{number(run.steps)}</td>
      <td class="number">
        {best && (
          <>
            <small>{best[0]}</small> {number(best[1])}
          </>
        )}
      </td>
      {hasGroups && <td>{run.group}</td>}
      <td title={run.base_model}>{shortName(run.base_model)}</td>
      <td class="number">{run.rank}</td>
      {hasOwners && <td>{run.owner}</td>}
      {keys.map((key) => (
        <td key={key}>{metadataText(run, key)}</td>
      ))}
      <td title={dateTime(run.created_at)}>{ago(run.created_at)}</td>
      <td title={dateTime(changed)}>{ago(changed)}</td>
    </tr>
  );
}
