// Runs as a table, with what their clients have said of them as columns.
import { caller } from "./api";
import type { Run } from "./api_types";
import { url } from "./logic/addresses";
import { ago, dateTime, number, shortName } from "./logic/format";
import type { Order } from "./logic/orders";
import { metadataColumns, metadataText } from "./logic/run_metadata";
import { healthClass, healthText, runName } from "./logic/runs";
import type { RunSort } from "./logic/runs";
import { headline } from "./logic/series";
import { Wide } from "./parts";
import { address } from "./router";
import { SortedHeads } from "./sorted_heads";
import type { SortedColumn } from "./sorted_heads";

interface Props {
  runs: Run[];
  order: Order<RunSort>;
  sortBy: (sort: RunSort) => void;
}

export function RunTable({ runs, order, sortBy }: Props) {
  const hasOwners = caller.value?.needs_key === true && caller.value.role === "admin";
  const keys = metadataColumns(runs);
  const columns: SortedColumn<RunSort>[] = [
    ["Name", null, false],
    ["State", null, false],
    ["Steps", null, true],
    ["Newest value", null, true],
    ["Base model", "model", false],
    ["Rank", "rank", true],
    ...(hasOwners ? [["Owner", "owner", false] as SortedColumn<RunSort>] : []),
    ...keys.map((key): SortedColumn<RunSort> => [key, null, false]),
    ["Created", "created", false],
    ["Last changed", "changed", false],
  ];
  return (
    <Wide label="Table of runs">
      <table class="rows run-table">
        <SortedHeads columns={columns} order={order} sortBy={sortBy} />
        <tbody>
          {runs.map((run) => (
            <Row key={run.id} {...{ run, keys, hasOwners }} />
          ))}
        </tbody>
      </table>
    </Wide>
  );
}

function Row({ run, keys, hasOwners }: { run: Run; keys: string[]; hasOwners: boolean }) {
  const best = headline(run);
  const changed = run.last_at ?? run.created_at;
  return (
    <tr>
      <th scope="row">
        <a href={address(url`/runs/${run.id}`)} title={run.id}>
          {runName(run)}
        </a>
      </th>
      <td class={healthClass(run.health)} title={healthText(run.health)}>
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
