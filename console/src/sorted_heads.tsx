// The head of a table that the server sorts.

import type { Order } from "./logic/orders";

/** A column: its name, what it is sorted by (null: nothing), and whether it has numbers. */
export type SortedColumn<Sort extends string> = [string, Sort | null, boolean];

export function SortedHeads<Sort extends string>({
  columns,
  order,
  sortBy,
}: {
  columns: readonly SortedColumn<Sort>[];
  order: Order<Sort>;
  sortBy: (sort: Sort) => void;
}) {
  const direction = order.ascending ? "ascending" : "descending";
  return (
    <thead>
      <tr>
        {columns.map(([name, sort, isNumber]) => (
          <th
            key={name}
            scope="col"
            class={isNumber ? "number" : undefined}
            aria-sort={sort !== null && sort === order.sort ? direction : undefined}
          >
            {sort === null ? (
              name || <span class="unseen">Actions</span>
            ) : (
              <button type="button" class="sort" onClick={() => sortBy(sort)}>
                {name}
                <span aria-hidden="true">{sort === order.sort ? (order.ascending ? " ↑" : " ↓") : ""}</span>
              </button>
            )}
          </th>
        ))}
      </tr>
    </thead>
  );
}
