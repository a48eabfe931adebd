// One trajectory: its turns as a tree in lanes, each with its messages, its tokens, and why it stands there.
import { useEffect, useMemo, useRef, useState } from "preact/hooks";
import { outlineTrajectory, readTurns } from "../api";
import type { TrajectoryEntry, TrajectoryTree, TurnEntry } from "../api_types";
import { poll } from "../live";
import { ago, dateTime, number, percent } from "../logic/format";
import { graph, width } from "../logic/lanes";
import { cachedShare, filledIn, modelName, requestOf, unread } from "../logic/trajectories";
import { Loading, Problem } from "../parts";
import { address } from "../router";
import { Legend } from "../tokens";
import { Turn } from "../turn";

const POLL_SECONDS = 10;
const OPEN_AT_FIRST = 12; // turns; of a longer trajectory only the last one is open
const READ_AT_ONCE = 8; // requests

export function Trajectory({ id }: { id: string }) {
  const [tree, setTree] = useState<TrajectoryTree | null>(null);
  const [error, setError] = useState<string | null>(null);
  const { turns, isOpen, toggle, openAll, problem } = useTurns(id, tree);
  useEffect(
    () =>
      poll(
        () =>
          outlineTrajectory(id).then((news) => {
            setTree(news);
            setError(null);
          }),
        POLL_SECONDS,
        (refused) => setError(refused.message),
      ),
    [id],
  );
  const rows = useMemo(() => graph(turns), [turns]);
  const numbers = useMemo(() => new Map(turns.map((turn, i) => [turn.id, i + 1])), [turns]);
  const lanes = width(rows);
  return (
    <>
      <nav class="trail" aria-label="Path">
        <a href={address("/trajectories")}>Trajectories</a> <span aria-hidden="true">/</span>
      </nav>
      <h1>{tree?.trajectory.name ?? id}</h1>
      <Problem text={error ?? problem} />
      {!tree && !error && <Loading />}
      {tree && <Facts trajectory={tree.trajectory} />}
      {tree && turns.length === 0 && <p class="empty">It has no turns yet.</p>}
      {turns.length > 0 && (
        <>
          <div class="bar">
            <h2>Turns</h2>
            <button type="button" onClick={() => openAll(true)}>
              Open all
            </button>
            <button type="button" onClick={() => openAll(false)}>
              Close all
            </button>
            <span class="dim">log-probability of a sampled token, in nats:</span>
            <Legend />
          </div>
          <ol class="tree">
            {turns.map((turn, i) => (
              <Turn
                key={turn.id}
                turn={turn}
                number={i + 1}
                parent={turn.parent === null ? null : (numbers.get(turn.parent) ?? null)}
                row={rows[i]!}
                lanes={lanes}
                isOpen={isOpen(turn)}
                toggle={() => toggle(turn)}
              />
            ))}
          </ol>
        </>
      )}
    </>
  );
}

/** The turns of an outline, of which those that are open are read. */
function useTurns(id: string, tree: TrajectoryTree | null) {
  const [open, setOpen] = useState<ReadonlySet<string> | null>(null); // requests; null: nobody has chosen
  const [read, setRead] = useState<ReadonlyMap<string, TurnEntry[]>>(new Map());
  const [problem, setProblem] = useState<string | null>(null);
  const isReading = useRef(false);
  const outline = tree?.turns ?? [];
  const requests = outline.map((turn) => requestOf(turn.id));
  const shown = open ?? new Set(outline.length <= OPEN_AT_FIRST ? requests : requests.slice(-1));
  const wanted = unread(outline, shown, read, READ_AT_ONCE);
  useEffect(() => {
    if (wanted.length === 0 || isReading.current) return;
    isReading.current = true;
    void readTurns(id, wanted)
      .then(
        (answer) => {
          const news = new Map(read);
          for (const request of wanted)
            news.set(
              request,
              answer.turns.filter((turn) => requestOf(turn.id) === request),
            );
          setRead(news);
          setProblem(null);
        },
        (refused: Error) => setProblem(refused.message),
      )
      .finally(() => {
        isReading.current = false;
      });
  }, [id, wanted.join(), read]);
  const turns = useMemo(() => filledIn(outline, read), [tree, read]);
  const toggle = (turn: TurnEntry) => {
    const next = new Set(shown);
    const request = requestOf(turn.id);
    if (!next.delete(request)) next.add(request);
    setOpen(next);
  };
  const isOpen = (turn: TurnEntry) => shown.has(requestOf(turn.id));
  const openAll = (isAll: boolean) => setOpen(new Set(isAll ? requests : []));
  return { turns, isOpen, toggle, openAll, problem };
}

function Facts({ trajectory }: { trajectory: TrajectoryEntry }) {
  const begun = Date.parse(trajectory.created_at) / 1000;
  const used = Date.parse(trajectory.used_at) / 1000;
  const again = percent(trajectory.reused_tokens, trajectory.prompt_tokens);
  const branches = trajectory.branches === 1 ? "1 branch" : `${number(trajectory.branches)} branches`;
  const facts: [string, string, string?][] = [
    ["Model", modelName(trajectory), trajectory.weights ?? trajectory.model ?? undefined],
    ["State", trajectory.state],
    ["Reward", number(trajectory.reward)],
    ["Turns", `${number(trajectory.turns)}, with ${branches}`],
    ["Prompt tokens", `${number(trajectory.prompt_tokens)}, of which ${again} repeat earlier turns`],
    ["Of these, cached", cachedShare(trajectory)],
    ["Sampled tokens", number(trajectory.sampled_tokens)],
    ["Started", ago(begun), dateTime(begun)],
    ["Last used", ago(used), dateTime(used)],
    ...Object.entries({ ...trajectory.metrics, ...trajectory.user_metadata }).map(
      ([name, value]) => [name, typeof value === "string" ? value : JSON.stringify(value)] as [string, string],
    ),
  ];
  return (
    <dl class="facts">
      {facts.map(([name, value, title]) => (
        <div key={name}>
          <dt>{name}</dt>
          <dd title={title}>{value}</dd>
        </div>
      ))}
    </dl>
  );
}
