// Calls to the server: its models, its datastores, streams, and errors in words.

import { $, counted, field, make, number, oneLine, Problem, stored, within } from "./dom.js";
import { openPanel, select } from "./frame.js";

/** @import { Chunk } from "./types.js" */

function headers() {
  const key = field("key").value.trim();
  return { "content-type": "application/json", ...(key ? { authorization: `Bearer ${key}` } : {}) };
}

/** Return the response of a call. Throws Problem, or AbortError.
    @param {string} path @param {RequestInit} [options] */
export async function call(path, options = {}) {
  const response = await fetch(path, { headers: headers(), ...options }).catch(error => {
    if (error.name === "AbortError") throw error;
    throw new Problem("The server does not answer. Is it still running?", "gone");
  });
  if (response.ok) return response;
  const error = await response.json().then(body => body.error || {}, () => ({})); // a proxy may answer in HTML
  const retry = response.headers.get("retry-after");
  if (response.status === 401) {
    throw new Problem("This server asks for an API key, and the settings of this page have none that it knows.", "key");
  }
  if (error.code === "loading") {
    throw new Problem("The model is being loaded. This page goes on by itself when it is ready.", "loading");
  }
  if (response.status === 503 && (!error.message || error.code === "busy")) {
    const when = retry ? `in ${retry} s` : "soon";
    throw new Problem(`The server is full, and so is its queue. Try again ${when}.`, "busy");
  }
  if (response.status === 413) {
    throw new Problem("This is more than the server takes in one request (--max-body). Attach less.", error.code);
  }
  throw new Problem(oneLine(String(error.message || `The server answered with status ${response.status}.`), 1000), error.code);
}

/** Yield the events of a stream. Throws Problem, or AbortError.
    @param {Response} response @returns {AsyncGenerator<Chunk>} */
export async function* eventsOf(response) {
  if (!response.body) return;
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let pieces = [""]; // the beginning of an event whose end has not come yet
  for (;;) {
    const { value, done } = await reader.read().catch(error => {
      throw error.name === "AbortError" ? error : new Problem("The connection to the server was lost.", "gone");
    });
    if (done) return;
    pieces.push(value);
    if (!value.includes("\n")) continue; // in the middle of a giant event
    const events = pieces.join("").split("\n\n");
    pieces = [events.pop() || ""];
    for (const event of events) {
      const data = event.replace(/^data: /, "");
      if (data !== "[DONE]" && !data.startsWith(":")) yield JSON.parse(data);
    }
  }
}

/** The problem that the notice shows.
    @type {Problem | null} */
export let noticed = null;

/** Show a problem in the notice, or hide it.
    @param {Problem | null} problem */
export function say(problem) {
  noticed = problem;
  $("notice").hidden = !problem;
  within($("notice"), "span").textContent = problem ? problem.message : "";
  if (!problem) return;
  if (problem.code === "key") {
    openPanel("side");
    $("settings").setAttribute("open", "");
  }
  if (problem.code === "loading" || problem.code === "gone") awaitModel();
}

/** Show an error that is a Problem. Any other is a fault of the page, and is thrown again.
    @param {unknown} error */
export function report(error) {
  if (!(error instanceof Problem)) throw error;
  say(error);
}

within($("notice"), "button").addEventListener("click", () => say(null));

/** @type {ReturnType<typeof setInterval> | null} */
let awaiting = null;
function awaitModel() {
  awaiting ||= setInterval(async () => {
    const health = await fetch("/health").catch(() => null);
    if (!health || !health.ok) return;
    if (awaiting) clearInterval(awaiting);
    awaiting = null;
    connect();
  }, 1000);
}

// ---- Models and datastores ---------------------------------------------------------------------------------------

export const server = {
  model: "", // its name
  chosen: "", // the name in requests, if there is a choice
  vision: false,
};

let connecting = 0; // The answers to an earlier choice of a model may come late.

/** Ask the server for its models and datastores, and show them. */
export async function connect() {
  const before = noticed; // a problem that appears meanwhile belongs to a request, and stays
  const turn = connecting += 1;
  try {
    listModels((await (await call("/v1/models")).json()).data);
    const query = server.chosen ? `?model=${encodeURIComponent(server.chosen)}` : "";
    const props = await (await call(`/props${query}`)).json(), settings = props.default_generation_settings;
    const datastores = (await (await call(`/datastores${query}`)).json()).data;
    if (turn !== connecting) return;
    const slots = props.total_slots, alias = server.chosen || props.model_alias;
    server.model = alias;
    server.vision = Boolean(props.modalities?.vision);
    const facts = [`${number(settings.n_ctx)} tokens of context`, counted(slots, "slot"), ...(server.vision ? ["reads images"] : [])];
    $("model").textContent = [...(server.chosen ? [] : [oneLine(alias, 80)]), ...facts].join(" · ");
    showDefaults(settings.params || {});
    const chats = Boolean(props.chat_template);
    $("no-template").hidden = chats;
    within(document, "[data-mode=chat]").hidden = !chats;
    if (!chats && !$("chat").hidden) {
      const writing = document.activeElement === $("message");
      select("complete");
      if (writing) $("text").focus();
    }
    listDatastores(datastores);
    if (noticed === before && noticed?.code !== "storage") say(null);
  } catch (error) {
    if (turn !== connecting) return;
    report(error);
    $("model").textContent = noticed?.code === "loading" ? "loading the model" : noticed?.code === "key" ? "waiting for a key" : "not connected";
  }
}

/** Show the choice of models if there are several.
    @param {{ id: string, status?: { value: string } }[]} rows */
function listModels(rows) {
  const names = rows.map(row => row.id), kept = stored("localStorage", "rest-local-model");
  server.chosen = names.length < 2 ? "" : [server.chosen, kept || "", names[0]].find(name => names.includes(name)) || "";
  $("model-choice").hidden = names.length < 2;
  $("model-choice").replaceChildren(...names.map(name => {
    const option = make("option", "", oneLine(name, 80));
    option.value = name;
    return option;
  }));
  if (server.chosen) field("model-choice").value = server.chosen;
  const { status } = rows.find(row => row.id === (server.chosen || names[0])) || {};
  if (status && status.value !== "loaded") $("model").textContent = "loading the model"; // by the next call
}

$("model-choice").addEventListener("change", () => {
  server.chosen = field("model-choice").value;
  stored("localStorage", "rest-local-model", server.chosen);
  connect();
});

/** Show what the server takes where a setting is empty.
    @param {Record<string, unknown>} params */
function showDefaults(params) {
  for (const [id, name] of [["top-p", "top_p"], ["top-k", "top_k"], ["min-p", "min_p"]]) {
    const value = params[name];
    if (typeof value === "number") field(id).placeholder = String(Math.round(1000 * value) / 1000);
  }
}

export const datastoreBoxes = () => [...$("datastores").querySelectorAll("input")];

/** @param {{ name: string, open: boolean, error?: string, tokens: number }[]} rows */
function listDatastores(rows) {
  const off = new Set(datastoreBoxes().filter(box => !box.checked).map(box => box.value));
  const open = rows.filter(row => row.open && !row.error), closed = rows.length - open.length;
  const boxes = open.map(row => {
    const box = make("input");
    Object.assign(box, { type: "checkbox", checked: !off.has(row.name), value: row.name });
    return make("label", "", box, make("span", "", oneLine(row.name, 80)), make("span", "small", `${number(row.tokens)} tokens`));
  });
  const none = "None is open. The server opens those that it is started with.";
  const hint = open.length ? closed && `${counted(closed, "more datastore")} on disk ${closed === 1 ? "is" : "are"} not open in this server.` : none;
  within($("datastores"), "div").replaceChildren(...boxes, ...(hint ? [make("p", "hint", hint)] : []));
}
