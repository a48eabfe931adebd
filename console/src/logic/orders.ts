// The order of a table that the server sorts.

export interface Order<Sort extends string> {
  sort: Sort;
  ascending: boolean;
}

/** The order after a click on a head: the other direction, or a new column from its most telling end. */
export function orderAfter<Sort extends string>(
  order: Order<Sort>,
  sort: Sort,
  fromStart: readonly Sort[],
): Order<Sort> {
  return { sort, ascending: order.sort === sort ? !order.ascending : fromStart.includes(sort) };
}
