// The groups of workers of a server: a table of them, and what is known of one.
import { useState } from "preact/hooks";
import type { ServerPage } from "./api_types";
import { ago, bytes, number, span } from "./logic/format";
import { Choice, Head, Parts, Wide } from "./parts";
import { place, remember } from "./router";
import { Share } from "./share";

const MOST_PROGRAMS = 8;

type Group = ServerPage["groups"][number];

/** All groups; of several, one is chosen to be shown. */
export function Groups({ groups, now }: { groups: Group[]; now: number }) {
  const [name, setName] = useState(place.value.query.get("group"));
  const shown = groups.find((group) => group.name === name) ?? groups[0]!;
  const choose = (next: string) => {
    setName(next);
    remember({ group: next });
  };
  return (
    <>
      {groups.length > 1 && <Table groups={groups} />}
      {groups.length > 1 && (
        <div class="bar">
          <h2>Group</h2>
          <Choice
            legend="Group"
            name="group"
            options={groups.map((group) => [group.name, group.name] as const)}
            value={shown.name}
            choose={choose}
          />
        </div>
      )}
      <Mesh group={shown} />
      <div class="columns">
        <Memory group={shown} />
        <Generations group={shown} now={now} />
      </div>
      <Programs group={shown} now={now} />
    </>
  );
}

const NUMBERS = ["Generation", "Processes", "Waiting", "Running", "Devices in use"];

function Table({ groups }: { groups: Group[] }) {
  return (
    <Wide label="Groups">
      <h2>Groups</h2>
      <table class="rows">
        <Head names={["Name", "Base model", "Role", ...NUMBERS, "State"]} numbers={NUMBERS} />
        <tbody>
          {groups.map((group) => (
            <tr key={group.name}>
              <th scope="row">{group.name}</th>
              <td>{group.base_model}</td>
              <td>{group.role}</td>
              <td class="number">{group.generations[0]?.number ?? "–"}</td>
              <td class="number" title={hosts(group)}>
                {group.hosts.length || "–"}
              </td>
              <td class="number">{number(group.waiting)}</td>
              <td class="number">{number(group.running)}</td>
              <td class="number">
                <Share part={group.busy} />
              </td>
              <td class={group.state === "ready" ? "good" : group.state === "failed" ? "bad" : undefined}>
                {group.state === "ready" ? "ready" : group.phase}
              </td>
            </tr>
          ))}
        </tbody>
      </table>
    </Wide>
  );
}

const hosts = (group: Group) => [...new Set(group.hosts)].join(", ");

function Mesh({ group }: { group: Group }) {
  const mesh = Object.entries(group.mesh)
    .map(([axis, size]) => `${axis} ${size}`)
    .join(" · ");
  const shown: [string, string][] = [
    ["Base model", group.base_model],
    ["Role", group.role],
    ["Mesh", mesh],
    ["Devices", group.device ?? ""],
    ["Hosts", hosts(group)],
  ];
  return (
    <dl class="facts">
      {shown.map(([name, value]) => (
        <div key={name}>
          <dt>{name}</dt>
          <dd>{value || "–"}</dd>
        </div>
      ))}
    </dl>
  );
}

function Memory({ group: { memory } }: { group: Group }) {
  return (
    <section>
      <h2>Memory of each device {memory && <small>{bytes(memory.device_bytes)} in all</small>}</h2>
      {!memory && <p class="empty">No workers were ready yet.</p>}
      {memory && (
        <Parts
          label="Memory"
          whole={memory.device_bytes}
          show={bytes}
          parts={memory.uses.map(({ use, bytes: size, note }) => ({ name: use, size, note }))}
        />
      )}
      {memory && (
        <dl class="pairs">
          {memory.choices.map(([what, choice]) => (
            <div key={what}>
              <dt>{what}</dt>
              <dd>{choice}</dd>
            </div>
          ))}
        </dl>
      )}
    </section>
  );
}

function Generations({ group, now }: { group: Group; now: number }) {
  return (
    <Wide label="Generations of workers">
      <h2>
        Generations of workers <small>a new one begins when workers are started again</small>
      </h2>
      <table class="rows">
        <Head names={["Number", "Began", "Start took", "End"]} numbers={["Began", "Start took"]} />
        <tbody>
          {group.generations.map((each) => (
            <tr key={each.number}>
              <th scope="row">{each.number}</th>
              <td class="number">{ago(each.began_at, now)}</td>
              <td class="number">{each.ready_at === null ? "–" : span(each.ready_at - each.began_at)}</td>
              <td>
                {each.ended_at === null ? (
                  <span class="good">{each.ready_at === null ? "starting" : "running"}</span>
                ) : (
                  `${ago(each.ended_at, now)}: ${each.reason}`
                )}
              </td>
            </tr>
          ))}
        </tbody>
      </table>
    </Wide>
  );
}

function Programs({ group: { programs }, now }: { group: Group; now: number }) {
  const recent = programs.recent.slice(0, MOST_PROGRAMS);
  return (
    <Wide label="Programs">
      <h2>
        Compiled programs{" "}
        <small>
          {[
            programs.planned > 0 && `${programs.ready} of ${programs.planned} ready`,
            programs.compiling && `compiling ${programs.compiling}`,
          ]
            .filter(Boolean)
            .join(", ")}
        </small>
      </h2>
      {recent.length === 0 && <p class="empty">No program has been compiled yet.</p>}
      {recent.length > 0 && (
        <table class="rows">
          <Head names={["Program", "Took", "Sessions waiting", "When"]} numbers={["Took", "Sessions waiting"]} />
          <tbody>
            {recent.map((each) => (
              <tr key={`${each.program} ${each.ended_at}`}>
                <th scope="row">
                  {each.program}
                  {each.error && <span class="bad"> {each.error}</span>}
                </th>
                <td class="number">{span(each.seconds)}</td>
                <td class="number">{each.waiting || "–"}</td>
                <td>{ago(each.ended_at, now)}</td>
              </tr>
            ))}
          </tbody>
        </table>
      )}
    </Wide>
  );
}
