// A turn of a trajectory: its place in the graph, why it stands there, what was said, what was sampled.
import { useState } from "preact/hooks";
import type { TurnEntry, TurnMessage } from "./api_types";
import { dateTime, number } from "./logic/format";
import type { GraphRow } from "./logic/lanes";
import { cut, modelName, shownTokens, why } from "./logic/trajectories";
import { Tokens } from "./tokens";

const LANE = 12; // pixels
const DOT = 17; // pixels from the top of a turn to its dot
const MOST_TEXT = 3000; // characters of a message that are shown at first
const MOST_TOKENS = [1536, 512] as const; // the first and the last ones
const IN_WORDS: Record<string, string> = {
  open: "being sampled",
  failed: "failed",
  cut: "cut: its client has hung up",
  broken: "a tool call cannot be read",
  unclosed: "a tool call does not end",
  unknown_tool: "calls a tool that it was not given",
  open_reasoning: "its reasoning does not end",
};

interface TurnProps {
  turn: TurnEntry;
  number: number;
  parent: number | null; // its number
  row: GraphRow;
  lanes: number;
  isOpen: boolean;
  toggle: () => void;
}

export function Turn({ turn, number: place, parent, row, lanes, isOpen, toggle }: TurnProps) {
  const cause = why(turn);
  const problem = [turn.state, turn.status].filter((each) => each && !["sampled", "ok"].includes(each));
  const prompt = turn.reused_tokens + turn.new_tokens;
  return (
    <li class="turn">
      <Graph row={row} lanes={lanes} />
      <article aria-label={`Turn ${place}`}>
        <p class="bar">
          <button type="button" class="quiet" aria-expanded={isOpen} onClick={toggle}>
            <span aria-hidden="true">{isOpen ? "▾" : "▸"}</span> Turn {place}
          </button>
          {turn.agent && <span>{turn.agent}</span>}
          {cause && (
            <strong class="cause">
              {cause}
              {parent !== null && `, after turn ${parent}`}
            </strong>
          )}
          {problem.map((each) => (
            <span key={each} class={each === "open" ? "dim" : "bad"}>
              {IN_WORDS[each!] ?? each}
            </span>
          ))}
          <span class="dim">
            {number(prompt)} prompt tokens ({number(turn.new_tokens)} new
            {turn.cached_tokens !== null && `, ${number(turn.cached_tokens)} cached`}
            ), {number(turn.sampled_tokens)} sampled
            {turn.stop_reason === "length" && ", cut off by max_tokens"}
          </span>
          {turn.reward !== null && <span>reward {number(turn.reward)}</span>}
          <span class="dim" title={turn.weights ?? turn.model}>
            {modelName(turn)}
          </span>
          <span class="dim" title={turn.dialect}>
            {dateTime(Date.parse(turn.created_at) / 1000)}
          </span>
        </p>
        {isOpen && <Content turn={turn} />}
      </article>
    </li>
  );
}

function Graph({ row, lanes }: { row: GraphRow; lanes: number }) {
  const x = (lane: number) => LANE * (lane + 0.5);
  return (
    <svg class="graph" width={LANE * lanes} aria-hidden="true">
      {row.lines.map(({ lane, color, from, to }) => (
        <line
          key={lane}
          class={`l-${color}`}
          x1={x(lane)}
          x2={x(lane)}
          y1={from === "above" ? 0 : DOT}
          y2={to === "below" ? "100%" : DOT}
        />
      ))}
      {row.arms.map(({ lane, color }) => (
        <line key={`arm ${lane}`} class={`l-${color}`} x1={x(row.lane)} x2={x(lane)} y1={DOT} y2={DOT} />
      ))}
      <circle class={`p-${row.color}`} cx={x(row.lane)} cy={DOT} r="4.5" />
    </svg>
  );
}

function Content({ turn }: { turn: TurnEntry }) {
  const { tokens = [], message } = turn;
  return (
    <>
      {turn.new_messages.map((each, i) => (
        <Message key={i} message={each} />
      ))}
      {tokens.length > 0 && (
        <section class="message assistant">
          <h3>
            sampled
            {turn.forced?.some(Boolean) && <span>; underlined: a grammar left no choice</span>}
          </h3>
          <Tokens content={shownTokens(turn, ...MOST_TOKENS)} />
        </section>
      )}
      {message?.calls?.map((call) => (
        <Call key={call.id ?? call.name} name={call.name} text={call.arguments} />
      ))}
    </>
  );
}

function Message({ message }: { message: TurnMessage }) {
  const { role, text = "", reasoning = "", calls = [], call_id } = message;
  return (
    <section class={`message ${role}`}>
      <h3>
        {role}
        {call_id && ` for ${call_id}`}
      </h3>
      {reasoning && <Cut text={reasoning} label="reasoning" />}
      {text && <Cut text={text} />}
      {calls.map((call) => (
        <Call key={call.id ?? call.name} name={call.name} text={call.arguments} />
      ))}
    </section>
  );
}

function Call({ name, text }: { name: string; text: string }) {
  return (
    <p class="call">
      <strong>{name}</strong> <Cut text={text} />
    </p>
  );
}

function Cut({ text, label }: { text: string; label?: string }) {
  const [isWhole, setWhole] = useState(false);
  const { text: shown, left } = cut(text, isWhole ? Number.POSITIVE_INFINITY : MOST_TEXT);
  return (
    <>
      {label && <h3>{label}</h3>}
      <pre tabIndex={0}>
        {shown}
        {left > 0 && <em class="cut"> …</em>}
      </pre>
      {left > 0 && (
        <button type="button" onClick={() => setWhole(true)}>
          Show {number(left)} more characters
        </button>
      )}
    </>
  );
}
