// Requests: what is sent, the answer while it comes, and stopping.

import { $, field, oneLine, Problem } from "./dom.js";
import { state } from "./state.js";
import { announce, Speaker, stateOf } from "./answer.js";
import { learnPlain, repaint } from "./figures.js";
import { forgetRemoved } from "./tokens.js";
import { focusText } from "./frame.js";
import { call, datastoreBoxes, eventsOf, noticed, report, say, server } from "./server.js";

/** @import { Answer } from "./answer.js" */
/** @import { Body, Conversation } from "./types.js" */

const SAVED_EVERY = 2000; // ms; so much of an answer is lost if its tab is closed
/** The settings that are numbers, and their names in a request. */
const NUMBERS = Object.entries({
  temperature: "temperature", "top-p": "top_p", "top-k": "top_k", "min-p": "min_p", "repeat-penalty": "repeat_penalty",
});

/** Return the fields of every request.
    @returns {Body} */
export function common() {
  const seed = field("seed").value, policy = field("policy").value, prediction = field("prediction").value, boxes = datastoreBoxes();
  /** @type {Body} */
  const body = {
    stream: true,
    return_progress: true,
    max_tokens: Math.max(1, Math.trunc(Number(field("max-tokens").value)) || 1024),
    // The page chooses the seed itself, so that an answer can be repeated.
    seed: seed === "" ? Math.floor(Math.random() * 2 ** 31) : Math.trunc(Number(seed)),
    rest_local: { origins: true, ...(policy && { policy }) },
  };
  for (const [id, name] of NUMBERS) {
    const { value } = field(id), whole = Number(field(id).step) === 1;
    if (value !== "" && Number.isFinite(Number(value))) body[name] = whole ? Math.trunc(Number(value)) : Number(value);
  }
  if (body.temperature !== undefined) body.temperature = Math.max(0, body.temperature);
  if (server.chosen) body.model = server.chosen;
  if (boxes.some(box => !box.checked)) body.datastore = boxes.filter(box => box.checked).map(box => box.value);
  if (prediction) body.prediction = { type: "content", content: prediction };
  return body;
}

/** @param {boolean} disabled */
function disableButtons(disabled) {
  const buttons = /** @type {NodeListOf<HTMLButtonElement>} */ (document.querySelectorAll(".send, button.idle"));
  for (const each of buttons) each.disabled = disabled;
}

/** Send the request of an answer, and feed the answer. Return the reason of its end, or "stopped". Throws Problem.
    @param {Answer} answer @param {(text: string) => void} changed @param {Conversation | null} [talk] */
export async function generate(answer, changed, talk = null) {
  const aborts = new AbortController();
  state.running = { answer, talk, abort: () => aborts.abort() };
  document.body.dataset.running = "";
  disableButtons(true);
  try {
    const { path, body } = answer.request;
    const response = await call(path, { method: "POST", body: JSON.stringify(body), signal: aborts.signal });
    for await (const chunk of eventsOf(response)) {
      changed(answer.take(chunk));
      forgetRemoved();
    }
    if (!answer.reason) throw new Problem("The connection ended before the answer did.");
    return answer.reason;
  } catch (error) {
    if (error instanceof DOMException && error.name === "AbortError") return "stopped";
    throw error;
  } finally {
    state.running = null;
    if (document.activeElement === $("stop")) focusText(); // the button is about to be hidden
    delete document.body.dataset.running;
    disableButtons(false);
  }
}

/** Say what the server does for an answer, or nothing if there is none.
    @param {Answer | null} answer @param {Conversation | null} [talk] */
function showState(answer, talk = null) {
  const reads = answer && answer.reads;
  $("reading").hidden = !reads;
  if (reads) Object.assign($("reading"), { max: reads.total, value: reads.processed });
  const where = talk && talk !== state.talk ? ` in “${oneLine(talk.row.title, 30)}”` : "";
  $("status").textContent = answer ? `${stateOf(answer)}${where}` : "";
}

/** Let an answer grow on the page, and show every problem. `save` keeps what there is of an answer in a conversation.
    @param {Answer} answer @param {HTMLElement} log
    @param {{ talk?: Conversation | null, save?: (() => Promise<void>) | null }} [conversation] */
export async function perform(answer, log, { talk = null, save = null } = {}) {
  say(noticed?.code === "storage" ? noticed : null);
  log.setAttribute("aria-busy", "true"); // screen readers are given sentences, not each token
  answer.foot.scrollIntoView({ block: "nearest" });
  state.followed = { log, answer, top: 0 };
  $("spoken").replaceChildren();
  showState(answer, talk);
  state.shown = answer;
  repaint();
  const speaker = answer.sheet ? new Speaker() : null;
  let saved = performance.now();
  const finish = async (/** @type {string} */ how) => {
    answer.finish(how);
    if (save && (answer.content || answer.thought || answer.reason)) await save(); // a reload may follow at once
    speaker?.add("", true);
  };
  try {
    const how = await generate(answer, text => {
      showState(answer, talk);
      repaint();
      speaker?.add(text);
      if (!save || performance.now() < saved + SAVED_EVERY) return;
      saved = performance.now();
      save();
    }, talk);
    learnPlain(answer);
    await finish(how);
    announce(how === "stopped" ? "Stopped" : "Done");
  } catch (error) {
    await finish("failed");
    report(error);
    if (noticed?.code === "key") $("key").focus();
  } finally {
    showState(null);
    log.setAttribute("aria-busy", "false");
    repaint();
  }
}
