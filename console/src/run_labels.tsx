// What people note about runs: names, groups, and which are archived.
import { useState } from "preact/hooks";
import { caller, changeRun, type RunChange } from "./api";
import type { Run } from "./api_types";
import { groupings } from "./logic/run_groups";
import { runName } from "./logic/runs";
import { Problem } from "./parts";

const MOST_CHARACTERS = 200;

export function mayChange(): boolean {
  return caller.value !== null && !caller.value.is_read_only;
}

export function GroupChoice({ runs, by, choose }: { runs: Run[]; by: string; choose: (by: string) => void }) {
  const known = groupings(runs);
  const options = known.some(([name]) => name === by) ? known : [...known, [by, by] as const];
  return (
    <label class="check">
      Group by
      <select value={by} onChange={(event) => choose(event.currentTarget.value)}>
        {options.map(([name, words]) => (
          <option key={name} value={name}>
            {words}
          </option>
        ))}
      </select>
    </label>
  );
}

/** Names one run, puts it into a group, and archives it. */
export function LabelForm({ run, renew }: { run: Run; renew: (run: Run) => void }) {
  const [name, setName] = useState(run.name ?? "");
  const [group, setGroup] = useState(run.group ?? "");
  const [error, setError] = useState<string | null>(null);
  const change = (wanted: RunChange) =>
    changeRun(run.id, wanted).then(
      (changed) => {
        setError(null);
        renew(changed);
      },
      (refused: Error) => setError(refused.message),
    );
  const submit = (event: SubmitEvent) => {
    event.preventDefault();
    void change({ name: name.trim() || null, group: group.trim() || null });
  };
  const isSame = name.trim() === (run.name ?? "") && group.trim() === (run.group ?? "");
  return (
    <details class="labels">
      <summary>Rename, group or archive</summary>
      <form class="bar" onSubmit={submit}>
        <LabelField label="Name" hint={runName({ ...run, name: null })} value={name} set={setName} />
        <LabelField label="Group" hint="none" value={group} set={setGroup} />
        <button type="submit" disabled={isSame}>
          Save
        </button>
        <button type="button" onClick={() => void change({ archived: run.archived_at === null })}>
          {run.archived_at === null ? "Archive" : "Take out of the archive"}
        </button>
      </form>
      <Problem text={error} />
    </details>
  );
}

interface LabelFieldProps {
  label: string;
  hint: string; // what counts while it is empty
  value: string;
  set: (value: string) => void;
}

function LabelField({ label, hint, value, set }: LabelFieldProps) {
  return (
    <label class="check">
      {label}
      <input
        type="text"
        maxLength={MOST_CHARACTERS}
        placeholder={hint}
        value={value}
        onInput={(event) => set(event.currentTarget.value)}
      />
    </label>
  );
}

/** Puts the marked runs into a group, or archives them. */
export function MarkedRuns({ marked, renew }: { marked: Run[]; renew: (run: Run) => void }) {
  const [group, setGroup] = useState("");
  const [error, setError] = useState<string | null>(null);
  const change = async (wanted: RunChange) => {
    try {
      for (const run of marked) renew(await changeRun(run.id, wanted));
      setError(null);
    } catch (refused) {
      setError((refused as Error).message);
    }
  };
  const submit = (event: SubmitEvent) => {
    event.preventDefault();
    void change({ group: group.trim() || null });
  };
  const areArchived = marked.every((run) => run.archived_at !== null);
  return (
    <form class="bar" aria-label="Marked runs" onSubmit={submit}>
      <span>{marked.length === 1 ? "1 run is marked" : `${marked.length} runs are marked`}</span>
      <LabelField label="Group" hint="none" value={group} set={setGroup} />
      <button type="submit">Set the group</button>
      <button type="button" onClick={() => void change({ archived: !areArchived })}>
        {areArchived ? "Take out of the archive" : "Archive"}
      </button>
      <Problem text={error} />
    </form>
  );
}
