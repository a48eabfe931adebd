// What agents have sampled below their base URLs: a list, searched and ordered by the server.
import { useEffect, useState } from "preact/hooks";
import { caller, listTrajectories } from "../api";
import type { TrajectoryEntry } from "../api_types";
import { poll } from "../live";
import { url } from "../logic/addresses";
import { ago, dateTime, number } from "../logic/format";
import { orderAfter } from "../logic/orders";
import type { Order } from "../logic/orders";
import { cachedShare, modelName } from "../logic/trajectories";
import { Choice, Loading, Problem, Wide } from "../parts";
import { address, place, remember } from "../router";
import { SortedHeads } from "../sorted_heads";
import type { SortedColumn } from "../sorted_heads";

const POLL_SECONDS = 10;
const STATES = [
  ["", "all"],
  ["open", "open"],
  ["finished", "finished"],
] as const;
type State = (typeof STATES)[number][0];
const SORTS = ["created", "used", "name", "turns", "size", "reward"] as const;
type Sort = (typeof SORTS)[number];

interface Listing {
  trajectories: TrajectoryEntry[];
  cursor: string | null;
  pages: number;
}

function orderOfAddress(): Order<Sort> {
  const sort = SORTS.find((each) => each === place.value.query.get("sort")) ?? "created";
  return { sort, ascending: place.value.query.get("ascending") === "true" };
}

export function Trajectories() {
  const [search, setSearch] = useState(place.value.query.get("search") ?? "");
  const [typed, setTyped] = useState(search);
  const [state, setState] = useState<State>(
    STATES.find(([each]) => each === place.value.query.get("state"))?.[0] ?? "",
  );
  const [order, setOrder] = useState(orderOfAddress);
  const [listing, setListing] = useState<Listing | null>(null);
  const [error, setError] = useState<string | null>(null);

  const load = async (known: Listing | null, isCurrent = () => true) => {
    try {
      const page = await listTrajectories({ ...order, search, state: state || null, cursor: known?.cursor ?? null });
      if (!isCurrent()) return;
      setListing({
        trajectories: [...(known?.trajectories ?? []), ...page.trajectories],
        cursor: page.cursor ?? null,
        pages: (known?.pages ?? 0) + 1,
      });
      setError(null);
    } catch (refused) {
      if (isCurrent()) setError((refused as Error).message);
    }
  };
  const isFollowing = (listing?.pages ?? 1) === 1;
  useEffect(() => {
    if (!isFollowing) return;
    let isOver = false;
    const end = poll(() => load(null, () => !isOver), POLL_SECONDS);
    return () => {
      isOver = true;
      end();
    };
  }, [search, state, order, isFollowing]);

  const sortBy = (sort: Sort) => {
    const next = orderAfter(order, sort, ["name"]);
    remember({ sort, ascending: String(next.ascending) });
    setListing(null);
    setOrder(next);
  };
  const submit = (event: Event) => {
    event.preventDefault();
    remember({ search: typed.trim() });
    setListing(null);
    setSearch(typed.trim());
  };
  const choose = (next: State) => {
    remember({ state: next });
    setListing(null);
    setState(next);
  };
  return (
    <>
      <form class="bar" role="search" onSubmit={submit}>
        <h1>Trajectories</h1>
        <input
          type="search"
          placeholder="Search names"
          aria-label="Search names"
          value={typed}
          onInput={(event) => setTyped(event.currentTarget.value)}
        />
        <button type="submit">Search</button>
        <Choice legend="State" name="state" options={STATES} value={state} choose={choose} />
      </form>
      <Problem text={error} />
      {!listing && !error && <Loading />}
      {listing?.trajectories.length === 0 &&
        (search || state ? (
          <p class="empty">No trajectory has this name and state.</p>
        ) : (
          <p class="empty">
            A trajectory is what an agent has sampled for one task, turn by turn. There are none yet: start an agent
            with a base URL such as <code>{location.origin}/oai/api/in/NAME/v1</code> or{" "}
            <code>{location.origin}/anthropic/api/in/NAME</code>, where NAME is yours to choose.
          </p>
        ))}
      {listing && listing.trajectories.length > 0 && (
        <Wide label="Trajectories">
          <table class="rows trajectories">
            <SortedHeads columns={COLUMNS} order={order} sortBy={sortBy} />
            <tbody>
              {listing.trajectories.map((each) => (
                <Row key={each.id} trajectory={each} />
              ))}
            </tbody>
          </table>
        </Wide>
      )}
      {listing?.cursor != null && (
        <button type="button" onClick={() => void load(listing)}>
          More trajectories
        </button>
      )}
    </>
  );
}

const COLUMNS: SortedColumn<Sort>[] = [
  ["Name", "name", false],
  ["Model", null, false],
  ["Turns", "turns", true],
  ["Branches", null, true],
  ["Prompt tokens", null, true],
  ["Of these, cached", null, true],
  ["Sampled tokens", null, true],
  ["Reward", "reward", true],
  ["State", null, false],
  ["Started", "created", false],
  ["Last used", "used", false],
];

function Row({ trajectory }: { trajectory: TrajectoryEntry }) {
  const begun = Date.parse(trajectory.created_at) / 1000;
  const used = Date.parse(trajectory.used_at) / 1000;
  return (
    <tr>
      <th scope="row">
        <a href={address(url`/trajectories/${trajectory.id}`)} title={trajectory.id}>
          {trajectory.name}
        </a>
        {caller.value?.needs_key && caller.value.role === "admin" && <small>{trajectory.owner}</small>}
      </th>
      <td title={trajectory.weights ?? trajectory.model ?? undefined}>{modelName(trajectory)}</td>
      <td class="number">{number(trajectory.turns)}</td>
      <td class="number">{number(trajectory.branches)}</td>
      <td class="number">{number(trajectory.prompt_tokens)}</td>
      <td class="number">{cachedShare(trajectory)}</td>
      <td class="number">{number(trajectory.sampled_tokens)}</td>
      <td class="number">{number(trajectory.reward)}</td>
      <td>{trajectory.state}</td>
      <td title={dateTime(begun)}>{ago(begun)}</td>
      <td title={dateTime(used)}>{ago(used)}</td>
    </tr>
  );
}
