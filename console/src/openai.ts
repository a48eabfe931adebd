// The OpenAI routes that the playground uses, and their streams.
import { get, Refused, request } from "./api";
import { likeliest, type Alternative } from "./logic/logprobs";

export interface Settings {
  model: string;
  temperature: number;
  top_p: number;
  max_tokens: number;
  n: number;
  seed: number | null;
}

export interface Message {
  role: "system" | "user" | "assistant";
  content: string;
  image?: string | null; // before the text, as a data URI
}

/** A message as OpenAI's chats have it. */
function sent({ role, content, image }: Message) {
  if (!image) return { role, content };
  const parts = [
    { type: "image_url", image_url: { url: image } },
    { type: "text", text: content },
  ];
  return { role, content: parts };
}

export interface Delta {
  index: number; // of the sample
  text: string;
  tokens: string[];
  logprobs: number[];
  finish: "stop" | "length" | null; // null: more follows
}

/** One sample, as far as it has come. */
export type Answer = Omit<Delta, "index">;

/** An answer with what has come since. */
export function extended(answer: Answer, delta: Delta): Answer {
  return {
    text: answer.text + delta.text,
    tokens: [...answer.tokens, ...delta.tokens],
    logprobs: [...answer.logprobs, ...delta.logprobs],
    finish: delta.finish ?? answer.finish,
  };
}

interface StreamEvent {
  error?: { message: string };
  choices: {
    index: number;
    text?: string;
    delta?: { content?: string };
    finish_reason: Delta["finish"];
    logprobs: { tokens: string[]; token_logprobs: number[] } | { content: { token: string; logprob: number }[] } | null;
  }[];
}

export async function listModels(): Promise<string[]> {
  const { data } = await get("/oai/api/v1/models");
  return data.map(({ id }) => id);
}

/** Completes a text, or writes the next message of a conversation. Aborting ends the samples on the server, too. */
export async function* stream(
  prompt: string | Message[],
  settings: Settings,
  signal: AbortSignal,
): AsyncGenerator<Delta> {
  const isChat = typeof prompt !== "string";
  const body = {
    ...settings,
    ...(isChat ? { messages: prompt.map(sent), logprobs: true } : { prompt, logprobs: 0 }),
    stream: true,
  };
  const response = await request(
    "POST",
    isChat ? "/oai/api/v1/chat/completions" : "/oai/api/v1/completions",
    body,
    signal,
  );
  for await (const event of events(response)) {
    if (event.error) throw new Refused(0, event.error.message);
    for (const choice of event.choices) {
      const logprobs = choice.logprobs;
      yield {
        index: choice.index,
        text: choice.text ?? choice.delta?.content ?? "",
        tokens: !logprobs ? [] : "content" in logprobs ? logprobs.content.map(({ token }) => token) : logprobs.tokens,
        logprobs: !logprobs
          ? []
          : "content" in logprobs
            ? logprobs.content.map(({ logprob }) => logprob)
            : logprobs.token_logprobs,
        finish: choice.finish_reason,
      };
    }
  }
}

const ALTERNATIVES = 5;

/**
 * Scores an answer once more, at temperature 1, and returns the likeliest tokens in the place of each of its
 * tokens, and this token where it is none of them.
 */
export async function alternatives(model: string, prompt: number[], answer: number[]): Promise<Alternative[][]> {
  const body = { model, prompt: [...prompt, ...answer], echo: true, max_tokens: 0, logprobs: ALTERNATIVES };
  const { choices } = await (await request("POST", "/oai/api/v1/completions", body)).json();
  const known: (Record<string, number> | null)[] = choices[0].logprobs.top_logprobs;
  return known.slice(prompt.length).map(likeliest);
}

async function* events(response: Response): AsyncGenerator<StreamEvent> {
  const reader = response.body!.pipeThrough(new TextDecoderStream()).getReader();
  for (let rest = ""; ; ) {
    const { value, done } = await reader.read();
    if (done) return;
    const parts = (rest + value).split("\n\n");
    rest = parts.pop()!;
    for (const part of parts) {
      const data = part.startsWith("data: ") ? part.slice(6) : "[DONE]"; // or a comment that keeps it alive
      if (data !== "[DONE]") yield JSON.parse(data);
    }
  }
}
