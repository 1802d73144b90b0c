// The types that several modules share. They are for `make check`; the server does not send this file.

import type { Answer } from "./answer.js";

/** Where a token came from, as in LEGEND and in the style sheet. */
export type Source = "own" | "context" | "datastore" | "history" | "prediction" | "drafter" | "grammar" | "edit";

/** A token as the server sends it with `rest_local.tokens`. */
export interface Token {
  text: string;
  source: string;
  file?: string | null;
  line?: number | null;
  match?: number | null;
  probability?: number | null;
}

/** A token on the page. */
export interface Word {
  answer: Answer;
  step: number;
  token: Token;
  source: Source;
  elements: HTMLElement[];
}

/** A step of an answer. */
export interface Place {
  answer: Answer;
  step: number;
}

export interface Timings {
  predicted_n: number;
  predicted_per_second: number;
  draft_n?: number;
  draft_n_accepted?: number;
}

export interface Draft {
  plain_step_ms?: number | null;
  lookups?: { made: number; skipped: number };
}

export interface Progress {
  total: number;
  cache: number;
  processed: number;
  time_ms: number;
}

/** An event of a stream: a chunk of /v1/chat/completions, or an event of /completion and /infill. */
export interface Chunk {
  error?: { message: string; code?: string };
  model?: string;
  choices?: { delta?: { content?: string; reasoning_content?: string }; finish_reason?: string | null }[];
  content?: string;
  stop?: boolean;
  stop_type?: string;
  timings?: Timings;
  prompt_progress?: Progress;
  rest_local?: { tokens?: Token[]; steps?: number[]; draft?: Draft };
}

/** The fields of a request that the page reads again. */
export interface Body {
  [field: string]: unknown;
  model?: string;
  temperature?: number;
  seed?: number;
  stream?: boolean;
  rest_local?: { policy?: string; origins?: boolean };
}

export interface Request {
  path: string;
  body: Body;
  model: string;
}

export type AttachedFile = { kind: "text"; name: string; text: string } | { kind: "image"; name: string; url: string };

/** What the browser keeps of an answer. */
export interface KeptAnswer {
  content: string;
  thought?: string;
  timings: Timings | null;
  draft: Draft | null;
  plainMs?: number;
  reason: string | null;
  steps: Token[][] | null;
  asked?: Body;
  model: string;
}

interface MessageRow {
  id: string;
  conversation: string;
  created: number;
  content: string;
}
export type Question = MessageRow & { role: "user"; files?: AttachedFile[] };
export type Reply = MessageRow & KeptAnswer & { role: "assistant" };
export type Message = Question | Reply;

export interface Row {
  id: string;
  title: string;
  system: string;
  created: number;
  changed: number;
}

export interface Conversation {
  row: Row;
  messages: Message[];
  deleted?: boolean;
}
