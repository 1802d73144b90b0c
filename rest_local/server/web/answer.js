// An answer: its text, its steps, its counts; and how it is read aloud. Knows how events of the server look.

import { $, counted, make, number, oneLine, printable, Problem, speedText } from "./dom.js";
import { colourGuessed } from "./colours.js";
import { MOST_SHOWN, seen, Sheet, written } from "./markdown.js";

/** @import { Chunk, Draft, KeptAnswer, Progress, Request, Source, Timings, Token, Word } from "./types.js" */

/** The sources of tokens: their names, and what they are.
    @type {Record<Source, [name: string, why: string]>} */
export const LEGEND = {
  own: ["the model", "its own words"],
  context: ["context", "the text so far"],
  datastore: ["datastore", "an index of code and text"],
  history: ["history", "earlier answers"],
  prediction: ["prediction", "text that you expect"],
  drafter: ["draft model", "a smaller model"],
  grammar: ["grammar", "text that the grammar forces"],
  edit: ["edited text", "an old text that is edited"],
};
export const CHAT = "/v1/chat/completions";
const LONG_PROMPT = 300; // tokens that take long enough to show how far they are read
const PLAIN_SHOWN = 1500; // characters of the given text that are shown on each side of an answer
const MOST_KEPT = 20_000; // tokens that are kept with their sources, about 1 MB; of longer answers only the text is kept
/** @type {Record<string, string | undefined>} */
const NAMES = { target: "own", model: "drafter" }; // how the server calls these sources

export class Answer {
  /** @param {Request} request */
  constructor(request, given = "", follows = "") {
    this.request = request;
    /** The words of each step.
        @type {Word[][]} */
    this.steps = [];
    this.counts = { own: 0, context: 0, datastore: 0, history: 0, prediction: 0, drafter: 0, grammar: 0, edit: 0 };
    /** How many tokens were found in each file.
        @type {Map<string, number>} */
    this.files = new Map();
    this.tokens = this.uncounted = 0; // the speed is measured from the first step on, which does not count
    this.content = this.thought = "";
    /** @type {Timings | null} */
    this.timings = null;
    /** @type {Draft | null} */
    this.draft = null;
    /** @type {Progress | null} */
    this.progress = null;
    /** Why the server ended the answer.
        @type {string | null} */
    this.reason = null;
    /** How the answer ended: its reason, or "stopped", "failed", "unfinished".
        @type {string | null} */
    this.how = null;
    this.withheld = false; // the server tells nothing about its drafts
    this.plainMs = 0; // what a token takes without drafting, if that was measured for this answer
    this.began = this.latest = 0;
    /** @type {Word | null} */
    this.stop = null;
    this.text = make("div", "text");
    this.text.setAttribute("role", "group");
    this.text.setAttribute("aria-label", "Answer. The left and right arrow keys go from token to token, up and down from step to step.");
    this.end = make("span", "waiting");
    const cutGiven = given.length > PLAIN_SHOWN ? "… " + given.slice(-PLAIN_SHOWN) : given;
    const cutBehind = follows.length > PLAIN_SHOWN ? follows.slice(0, PLAIN_SHOWN) + " …" : follows;
    this.text.append(make("span", "given", cutGiven), this.end, make("span", "given", cutBehind));
    this.foot = make("div", "foot small");
    this.tools = make("div", "tools small");
    this.element = make("article", "", this.text, this.foot, this.tools);
    this.sheet = request.path === CHAT ? new Sheet(this.text, this.end) : null; // else the text is code, not prose
    this.plainLength = 0;
  }

  /** @param {string} text @param {Word | null} [word] */
  write(text, word = null) {
    if (this.sheet) this.sheet.write(text, word);
    else if (this.plainLength < MOST_SHOWN) this.end.before(written(printable(text.slice(0, MOST_SHOWN)), "", word));
    this.plainLength += text.length;
  }

  /** Take an event of the server, and return the text that it adds to the answer, or throw Problem.
      @param {Chunk} chunk */
  take(chunk) {
    if (chunk.error) throw new Problem(chunk.error.message, chunk.error.code);
    if (!this.request.model && chunk.model) this.request.model = chunk.model; // asked before the page knew it
    const choice = chunk.choices?.[0];
    const said = choice ? choice.delta?.content : chunk.content;
    const thought = choice?.delta?.reasoning_content;
    const more = chunk.rest_local || {};
    this.content += said || "";
    this.thought += thought || "";
    if (more.tokens) this.addSteps(more.tokens, more.steps);
    else if (!this.tokens && (said || thought)) { // if tokens are sent, they contain all text
      this.write((thought || "") + (said || ""));
      this.withheld = true;
    }
    this.progress = chunk.prompt_progress || this.progress;
    this.draft = more.draft || this.draft;
    this.timings = chunk.timings || this.timings;
    if (chunk.stop) this.reason = chunk.stop_type === "limit" ? "length" : "stop";
    else if (choice?.finish_reason) this.reason = choice.finish_reason;
    return said || "";
  }

  /** Take tokens of several steps, which come in one event if they are fast.
      @param {Token[]} tokens */
  addSteps(tokens, sizes = [tokens.length]) {
    let at = 0;
    for (const size of sizes) this.addStep(tokens.slice(at, at += size));
    this.latest = performance.now();
    if (!this.began) {
      this.began = this.latest;
      this.uncounted = this.tokens;
    }
  }

  /** @param {Token[]} tokens */
  addStep(tokens) {
    const step = this.steps.length;
    this.steps.push(tokens.map(token => {
      const name = token.source.replace("~", ""), known = Object.hasOwn(NAMES, name) ? NAMES[name] || name : name;
      const source = Object.hasOwn(LEGEND, known) ? /** @type {Source} */ (known) : "own";
      /** @type {Word} */
      const word = { answer: this, step, token, source, elements: [] };
      if (token.text) this.write(token.text, word);
      this.counts[source] += 1;
      this.tokens += 1;
      if (token.file) this.files.set(token.file, (this.files.get(token.file) || 0) + 1);
      if (!this.stop || !seen(this.stop)) this.moveStop(seen(word) ? word : null);
      return word;
    }));
  }

  words() { return this.steps.flat().filter(seen) }

  /** Make this the one token that Tab reaches; the arrow keys move on from it.
      @param {Word | null} word */
  moveStop(word) {
    for (const element of this.stop?.elements || []) element.tabIndex = -1;
    this.stop = word;
    const element = word && seen(word);
    if (element) element.tabIndex = 0;
  }

  get speed() {
    if (this.timings) return this.timings.predicted_per_second;
    return this.latest > this.began ? (this.tokens - this.uncounted) / (this.latest - this.began) * 1e3 : 0;
  }

  get mat() { return this.steps.length ? this.tokens / this.steps.length : 0 }
  get drafted() { return this.tokens ? 1 - this.counts.own / this.tokens : 0 }
  /** How far a long prompt is read, until the first text comes. */
  get reads() {
    const { progress } = this;
    return !this.plainLength && progress && progress.total - progress.cache >= LONG_PROMPT ? progress : null;
  }
  get drafts() { return this.request.body.rest_local?.policy !== "off" }

  /** End the answer. `how` is the reason that the server gives, or "stopped", "failed", "unfinished".
      @param {string} how */
  finish(how) {
    this.how = how;
    if (this.sheet) this.sheet.finish();
    else {
      this.end.remove();
      colourGuessed(this.text);
    }
    const { timings, request } = this;
    const words = [];
    if (timings) words.push(counted(timings.predicted_n, "token"), `${speedText(timings.predicted_per_second)} tokens/s`);
    else if (this.tokens) words.push(counted(this.tokens, "token"));
    if (this.steps.length) words.push(`${number(this.mat, 2)} tokens/step`);
    if (timings?.draft_n) {
      words.push(`${number(timings.draft_n_accepted || 0)} of ${number(timings.draft_n)} drafted tokens accepted`);
    }
    const lookups = this.draft?.lookups;
    if (lookups?.skipped) {
      words.push(`looked up in ${number(lookups.made)} of ${number(lookups.made + lookups.skipped)} steps`);
    }
    words.push(how === "stop" ? "ended by itself" : how === "length" ? "cut at the limit of tokens" : how);
    if (request.body.temperature !== 0 && request.body.seed !== undefined) words.push(`seed ${request.body.seed}`);
    if (request.body.model) words.push(oneLine(request.body.model, 60));
    this.foot.replaceChildren(...words.map(word => make("span", "", word)));
  }

  /** Return what is kept of it: plain data.
      @returns {KeptAnswer} */
  kept() {
    const { content, thought, timings, draft, plainMs, how, request } = this, { temperature, seed, model } = request.body;
    const steps = this.tokens && this.tokens <= MOST_KEPT
      ? this.steps.map(step => step.map(({ token: { text, source, file, line, match, probability } }) => {
        const known = Object.entries({ file, line, match, probability }).filter(([, value]) => value !== null && value !== undefined);
        return { text, source, ...Object.fromEntries(known) };
      })) : null;
    return { content, thought, timings, draft, plainMs, reason: how, steps, asked: { temperature, seed, model }, model: request.model };
  }

  /** Make an answer that was kept.
      @param {KeptAnswer} message */
  static from(message) {
    const answer = new Answer({ path: CHAT, body: message.asked || {}, model: message.model });
    const { content, thought = "", timings, draft, plainMs = 0, reason, steps } = message;
    Object.assign(answer, { content, thought, timings, draft, plainMs, reason });
    if (steps) for (const step of steps) answer.addStep(step);
    else answer.write(thought + content);
    answer.finish(reason || "unfinished");
    return answer;
  }
}

/** Return what is said of an answer while it comes.
    @param {Answer} answer */
export function stateOf(answer) {
  if (answer.plainLength) return "Answering";
  if (!answer.reads) return "Waiting for the first token";
  const { total, cache, processed, time_ms: ms } = answer.reads;
  const left = ms > 1000 && processed > cache ? ms / 1000 * (total - processed) / (processed - cache) : 0;
  const time = left >= 1 ? `, about ${number(left)} s left` : "";
  return `Reading the prompt: ${number(processed)} of ${number(total)} tokens${time}`;
}

/** Gives an answer to screen readers in whole sentences, and code as the number of its lines. */
export class Speaker {
  constructor() {
    this.text = "";
    this.code = -1; // lines of the code block so far; -1 outside of one
  }

  /** Take more text, and what is left of it if the answer ends.
      @param {string} text */
  add(text, ends = false) {
    this.text += text;
    for (let found; (found = (this.code < 0 ? /\n|[.!?…]["')\]]*\s/ : /\n/).exec(this.text));) {
      const to = found.index + found[0].length;
      this.say(this.text.slice(0, to), found[0].endsWith("\n"));
      this.text = this.text.slice(to);
    }
    if (ends && this.text) this.say(this.text, true);
    if (ends && this.code >= 0) this.speak(`End of the code, ${counted(this.code, "line")}.`);
    else if (this.text.length > 2000) this.text = this.text.slice(-1000); // a giant line without a sentence
  }

  /** @param {string} sentence @param {boolean} endsLine */
  say(sentence, endsLine) {
    const fence = endsLine && /^ {0,3}(?:```|~~~)\s*([^`\s]*)/.exec(sentence);
    if (fence && this.code < 0) {
      this.code = 0;
      this.speak(`Code${fence[1] ? ` in ${fence[1]}` : ""}.`);
    } else if (fence) {
      this.speak(`End of the code, ${counted(this.code, "line")}.`);
      this.code = -1;
    } else if (this.code >= 0) this.code += 1;
    else this.speak(sentence.replace(/^\s*(#+|>|[-*+])\s/, "").replace(/\*\*|`/g, ""));
  }

  /** @param {string} sentence */
  speak(sentence) { announce(oneLine(sentence, 500)) }
}

/** Say something to screen readers.
    @param {string} text */
export function announce(text) {
  const spoken = $("spoken");
  if (text) spoken.append(make("p", "", text));
  while (spoken.childElementCount > 20) spoken.firstChild?.remove();
}
