"use strict";
// Calls to the server: its models, its datastores, streams, and errors in words.

function headers() {
  const key = $("key").value.trim();
  return { "content-type": "application/json", ...(key ? { authorization: `Bearer ${key}` } : {}) };
}

/** The response of a call. Throws Problem, or AbortError. */
async function call(path, options = {}) {
  let response;
  try {
    response = await fetch(path, { headers: headers(), ...options });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Problem("The server does not answer. Is it still running?", "gone");
  }
  if (response.ok) return response;
  const error = await response.json().then(body => body.error || {}, () => ({})); // a proxy may answer in HTML
  const retry = response.headers.get("retry-after");
  if (response.status === 401) {
    throw new Problem("This server asks for an API key, or does not know the one given: see Settings.", "key");
  }
  if (error.code === "loading") {
    throw new Problem("The model is being loaded. This page goes on by itself when it is there.", "loading");
  }
  if (response.status === 503 && (!error.message || error.code === "busy")) {
    const when = retry ? `in ${retry} s` : "soon";
    throw new Problem(`The server is full: every slot is taken and the queue too. Try again ${when}.`, "busy");
  }
  if (response.status === 413) {
    throw new Problem("This is more than the server takes in one request (--max-body): attach less.", error.code);
  }
  throw new Problem(oneLine(String(error.message || `The server answered with status ${response.status}.`), 1000), error.code);
}

async function* eventsOf(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let held = [];
  for (;;) {
    const { value, done } = await reader.read().catch(error => {
      throw error.name === "AbortError" ? error : new Problem("The connection to the server was lost.", "gone");
    });
    if (done) return;
    held.push(value);
    if (!value.includes("\n")) continue; // in the middle of a giant event
    const events = held.join("").split("\n\n");
    held = [events.pop()];
    for (const event of events) {
      const data = event.replace(/^data: /, "");
      if (data !== "[DONE]" && !data.startsWith(":")) yield JSON.parse(data);
    }
  }
}

let noticed = null; // the problem shown in the notice
function say(problem) {
  noticed = problem;
  $("notice").hidden = !problem;
  $("notice").firstChild.textContent = problem ? problem.message : "";
  if (!problem) return;
  if (problem.code === "key") {
    $("settings").open = true;
    openPanel("side");
  }
  if (problem.code === "loading" || problem.code === "gone") awaitModel();
}

let awaiting = null;
function awaitModel() {
  awaiting = awaiting || setInterval(async () => {
    const health = await fetch("/health").catch(() => null);
    if (!health || !health.ok) return;
    clearInterval(awaiting);
    awaiting = null;
    connect();
  }, 1000);
}

// ---- Models and datastores ---------------------------------------------------------------------------------------

const server = { models: [], model: "", chosen: "", vision: false, defaults: {} }; // model: its name; chosen: as a request names it

let connecting = 0; // counts, because what an earlier choice of a model is answered may come late

async function connect() {
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
    server.vision = Boolean(props.modalities && props.modalities.vision);
    const facts = [`${number(settings.n_ctx)} tokens of context`, counted(slots, "slot"), ...(server.vision ? ["reads images"] : [])];
    $("model").textContent = [...(server.chosen ? [] : [oneLine(alias, 80)]), ...facts].join(" · ");
    showDefaults(settings.params || {});
    const chats = Boolean(props.chat_template);
    $("no-template").hidden = chats;
    document.querySelector("[data-mode=chat]").hidden = !chats;
    if (!chats && !$("chat").hidden) {
      const writing = document.activeElement === $("message");
      select("complete");
      if (writing) $("text").focus();
    }
    listDatastores(datastores);
    if (noticed === before && noticed?.code !== "storage") say(null);
  } catch (problem) {
    if (turn !== connecting) return;
    $("model").textContent = { loading: "loading the model", key: "waiting for a key" }[problem.code] || "not connected";
    say(problem);
  }
}

/** The choice of models, if there is one: several names of one model are one. */
function listModels(rows) {
  const names = rows.map(row => row.id), kept = stored("localStorage", "rest-local-model");
  server.models = names;
  server.chosen = names.length < 2 ? "" : [server.chosen, kept, names[0]].find(name => names.includes(name));
  $("model-choice").hidden = names.length < 2;
  $("model-choice").replaceChildren(...names.map(name => {
    const option = make("option", "", oneLine(name, 80));
    option.value = name;
    return option;
  }));
  if (server.chosen) $("model-choice").value = server.chosen;
  const { status } = rows.find(row => row.id === (server.chosen || names[0])) || {};
  if (status && status.value !== "loaded") $("model").textContent = "loading the model"; // by the next call
}

$("model-choice").addEventListener("change", () => {
  server.chosen = $("model-choice").value;
  stored("localStorage", "rest-local-model", server.chosen);
  connect();
});

/** What the server takes where a setting is empty. */
function showDefaults(params) {
  for (const [id, name] of [["top-p", "top_p"], ["top-k", "top_k"], ["min-p", "min_p"]]) {
    if (typeof params[name] === "number") $(id).placeholder = String(Math.round(1000 * params[name]) / 1000);
  }
}

function listDatastores(rows) {
  const off = new Set([...$("datastores").querySelectorAll("input")].filter(box => !box.checked).map(box => box.value));
  const open = rows.filter(row => row.open && !row.error), closed = rows.length - open.length;
  const boxes = open.map(row => {
    const box = make("input");
    Object.assign(box, { type: "checkbox", checked: !off.has(row.name), value: row.name });
    return make("label", "", box, make("span", "", oneLine(row.name, 80)), make("span", "small", `${number(row.tokens)} tokens`));
  });
  const none = "none is open; the server opens those it is started with";
  const rest = closed ? `${closed} more on disk, not open in this server` : "";
  const hint = open.length ? rest : none;
  $("datastores").lastElementChild.replaceChildren(...boxes, ...(hint ? [make("p", "hint", hint)] : []));
}
