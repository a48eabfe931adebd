// Samples from the base model or a checkpoint: completions, and conversations.
import type { ComponentChildren } from "preact";
import { useEffect, useRef, useState } from "preact/hooks";
import { signal } from "@preact/signals";
import { caller, listCheckpoints } from "../api";
import { modelName } from "../logic/checkpoints";
import { number } from "../logic/format";
import { align, ENDS } from "../logic/samples";
import { extended, listModels, stream, type Answer, type Message, type Settings } from "../openai";
import { Choice, Problem } from "../parts";
import { place, remember } from "../router";
import { Legend, Tokens } from "../tokens";

const EMPTY: Answer = { text: "", tokens: [], logprobs: [], finish: null };
const DEFAULTS: Settings = { model: "", temperature: 1, top_p: 1, max_tokens: 256, n: 1, seed: null };

const CHECKPOINTS = 1000; // that are asked for marks
const best = signal<ReadonlySet<string>>(new Set()); // paths
const nameOf = (model: string) => modelName(model, best.value);

type Mode = "completion" | "chat";
const MODES = [
  ["completion", "Completion"],
  ["chat", "Chat"],
] as const;

export function Playground() {
  const [models, setModels] = useState<string[]>([]);
  const [settings, setSettings] = useState<Settings>({ ...DEFAULTS, model: place.value.query.get("model") ?? "" });
  const [mode, setMode] = useState<Mode>(place.value.query.get("mode") === "chat" ? "chat" : "completion");
  const isChat = mode === "chat";
  const [messages, setMessages] = useState<Message[]>([]);
  const [system, setSystem] = useState("");
  const [prompt, setPrompt] = useState("");
  const [image, setImage] = useState<string | null>(null);
  const [answers, setAnswers] = useState<Answer[]>([]);
  const [rival, setRival] = useState(place.value.query.get("against") ?? "");
  const [asked, setAsked] = useState<string[]>([]); // the models of the answers
  const [hasColours, setColours] = useState(false);
  const [error, setError] = useState<string | null>(null);
  const running = useRef<AbortController | null>(null);
  const [isRunning, setRunning] = useState(false);
  useEffect(() => {
    listModels().then(
      (listed) => {
        setModels(listed);
        setSettings((known) => ({ ...known, model: known.model || listed[0]! }));
      },
      (refused: Error) => setError(refused.message),
    );
    listCheckpoints(0, CHECKPOINTS).then(
      ({ checkpoints }) => {
        best.value = new Set(checkpoints.filter((each) => each.best).map((each) => each.tinker_path));
      },
      () => undefined,
    );
    return () => running.current?.abort();
  }, []);

  const mayNot = caller.value?.is_read_only ? "This API key may only read. Sign in with one that may sample." : null;

  const run = async (event: SubmitEvent) => {
    event.preventDefault();
    const sent: Message[] = [...messages, { role: "user", content: prompt, image }];
    const full: Message[] = system ? [{ role: "system", content: system }, ...sent] : sent;
    const wanted = isChat ? { ...settings, n: 1 } : settings;
    const names = isChat || !rival ? [settings.model] : [settings.model, rival];
    const drawn = Array.from({ length: names.length * wanted.n }, () => EMPTY);
    const leaving = new AbortController();
    running.current = leaving;
    setRunning(true);
    setError(null);
    setAnswers(drawn);
    setAsked(names);
    if (isChat) {
      setMessages(sent);
      setPrompt("");
      setImage(null);
    }
    try {
      const draw = async (model: string, first: number) => {
        for await (const delta of stream(isChat ? full : prompt, { ...wanted, model }, leaving.signal)) {
          drawn[first + delta.index] = extended(drawn[first + delta.index]!, delta);
          setAnswers([...drawn]);
        }
      };
      await Promise.all(names.map((model, i) => draw(model, i * wanted.n)));
    } catch (refused) {
      if (!leaving.signal.aborted) setError((refused as Error).message);
    }
    if (isChat) {
      if (drawn[0]!.text) {
        setMessages([...sent, { role: "assistant", content: drawn[0]!.text }]);
      } else {
        setMessages(messages);
        setPrompt(prompt);
        setImage(image);
        setAnswers([]);
      }
    }
    setRunning(false);
  };
  const toggleColours = () => setColours(!hasColours);
  const choose = (chosen: Mode) => {
    setMode(chosen);
    setAnswers([]);
    remember({ mode: chosen === "chat" ? "chat" : "" });
  };
  const change = (news: Partial<Settings>) => {
    setSettings({ ...settings, ...news });
    if (news.model) remember({ model: news.model });
  };
  const chooseRival = (name: string) => {
    setRival(name);
    remember({ against: name });
  };
  const clear = () => {
    setMessages([]);
    setAnswers([]);
  };
  // The last answer is shown with its tokens.
  const earlier = isRunning ? messages : messages.slice(0, answers.length ? -1 : undefined);
  return (
    <>
      <div class="bar">
        <h1>Playground</h1>
        <Choice legend="Mode" name="mode" options={MODES} value={mode} disabled={isRunning} choose={choose} />
        <label class="check">
          <input type="checkbox" checked={hasColours} onChange={toggleColours} /> Colour tokens by log-probability
        </label>
      </div>
      <Problem text={mayNot} />
      <Problem text={error} />
      <form class="playground" onSubmit={run}>
        <Controls models={models} settings={settings} isChat={isChat} change={change}>
          {!isChat && <Rival models={models} rival={rival} choose={chooseRival} />}
        </Controls>
        <section aria-label="Text">
          {isChat && (
            <label>
              System message{" "}
              <textarea rows={2} value={system} onInput={(event) => setSystem(event.currentTarget.value)} />
            </label>
          )}
          {isChat &&
            earlier.map((each, i) => (
              <article key={i} class={`message ${each.role}`}>
                <h3>
                  {each.role}
                  {each.image && ", with an image"}
                </h3>
                <pre>{each.content}</pre>
              </article>
            ))}
          {isChat && answers.map((each, i) => <One key={i} answer={each} name="assistant" hasColours={hasColours} />)}
          <label>
            {isChat ? "Message" : "Prompt"}{" "}
            <textarea
              rows={isChat ? 3 : 8}
              required
              value={prompt}
              onInput={(event) => setPrompt(event.currentTarget.value)}
              onKeyDown={sendOnEnter}
            />
          </label>
          {isChat && <ImageFile image={image} choose={setImage} />}
          <p class="bar">
            <button type="submit" class="main" disabled={isRunning || mayNot !== null || !settings.model}>
              {isChat ? "Send" : "Complete"}
            </button>
            <button type="button" disabled={!isRunning} onClick={() => running.current?.abort()}>
              Stop
            </button>
            {isChat && (
              <button type="button" disabled={isRunning || !messages.length} onClick={clear}>
                New conversation
              </button>
            )}
            <span class="note" role="status">
              {isRunning ? "Sampling …" : ""}
            </span>
          </p>
          {hasColours && <Legend />}
          {!isChat && (
            <div class={asked.length > 1 ? "pair" : undefined}>
              {asked.map((model, i) => (
                <section key={i} aria-label={nameOf(model)}>
                  {asked.length > 1 && <h2>{nameOf(model)}</h2>}
                  {answersOf(answers, i, asked.length).map((each, j) => (
                    <One key={j} answer={each} name={`Sample ${j + 1}`} hasColours={hasColours} />
                  ))}
                </section>
              ))}
            </div>
          )}
        </section>
      </form>
    </>
  );
}

/** The answers of one of several models, which have as many each. */
function answersOf(answers: Answer[], place: number, models: number): Answer[] {
  const count = answers.length / models;
  return answers.slice(place * count, (place + 1) * count);
}

/** Chooses a second model that answers the same prompt. */
function Rival({ models, rival, choose }: { models: string[]; rival: string; choose: (model: string) => void }) {
  const listed = models.includes(rival) || !rival ? models : [rival, ...models];
  return (
    <label>
      Compare with
      <select value={rival} title={rival} onChange={(event) => choose(event.currentTarget.value)}>
        <option value="">nothing</option>
        {listed.map((model) => (
          <option key={model} value={model}>
            {nameOf(model)}
          </option>
        ))}
      </select>
    </label>
  );
}

/** Takes a picture for the next message. */
function ImageFile({ image, choose }: { image: string | null; choose: (image: string | null) => void }) {
  const input = useRef<HTMLInputElement>(null);
  useEffect(() => {
    if (image === null && input.current) input.current.value = "";
  }, [image]);
  const read = (file: File | undefined) => {
    if (!file) return choose(null);
    const reader = new FileReader();
    reader.onload = () => choose(reader.result as string);
    reader.readAsDataURL(file);
  };
  return (
    <label>
      Image (PNG or JPEG){" "}
      <input
        ref={input}
        type="file"
        accept="image/png,image/jpeg"
        onChange={(event) => read(event.currentTarget.files?.[0])}
      />
    </label>
  );
}

/** Sends with Ctrl+Enter, since Enter alone begins a new line. */
function sendOnEnter(event: KeyboardEvent): void {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey))
    (event.currentTarget as HTMLTextAreaElement).form?.requestSubmit();
}

function One({ answer, name, hasColours }: { answer: Answer; name: string; hasColours: boolean }) {
  const { text, tokens, logprobs, finish } = answer;
  const content = { texts: align(text, tokens), tokens, logprobs, left_out: 0, left_out_at: -1 };
  return (
    <article class="message assistant">
      <h3>
        {name}: {number(tokens.length)} tokens{finish && `, ended by ${ENDS[finish]}`}
      </h3>
      {hasColours ? (
        <Tokens content={content} />
      ) : (
        <pre class="tokens" tabIndex={0}>
          {text}
        </pre>
      )}
    </article>
  );
}

function Controls({
  models,
  settings,
  isChat,
  change,
  children,
}: {
  models: string[];
  settings: Settings;
  isChat: boolean;
  change: (news: Partial<Settings>) => void;
  children: ComponentChildren; // behind the model
}) {
  const listed = models.includes(settings.model) || !settings.model ? models : [settings.model, ...models];
  const amount = (
    label: string,
    name: "temperature" | "top_p" | "max_tokens" | "n",
    bounds: { min: number; max?: number; step?: number | "any" },
  ) => (
    <label>
      {label}{" "}
      <input
        type="number"
        required
        value={settings[name]}
        {...bounds}
        onInput={(event) => change({ [name]: event.currentTarget.valueAsNumber })}
      />
    </label>
  );
  return (
    <section aria-label="Settings" class="controls">
      <label>
        Model
        <select
          value={settings.model}
          title={settings.model}
          onChange={(event) => change({ model: event.currentTarget.value })}
        >
          {listed.map((model) => (
            <option key={model} value={model}>
              {nameOf(model)}
            </option>
          ))}
        </select>
      </label>
      {children}
      {amount("Temperature", "temperature", { min: 0, step: "any" })}
      {amount("Top p", "top_p", { min: 0.001, max: 1, step: "any" })}
      {amount("Max tokens", "max_tokens", { min: 1 })}
      {!isChat && amount("Samples", "n", { min: 1, max: 16 })}
      <label>
        Seed{" "}
        <input
          type="number"
          placeholder="none"
          value={settings.seed ?? ""}
          onInput={(event) =>
            change({ seed: event.currentTarget.value === "" ? null : event.currentTarget.valueAsNumber })
          }
        />
      </label>
    </section>
  );
}
