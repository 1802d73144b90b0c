"use strict";
// Requests: what is sent, the answer as it comes, stopping, and the comparison with plain decoding.

const EXAMPLES = {
  chat: { message: "Repeat this code, with a docstring in each method:\n\n```python\nclass Queue:\n" +
    "    def __init__(self):\n        self.items = []\n\n    def put(self, item):\n        self.items.append(item)\n\n" +
    "    def get(self):\n        return self.items.pop(0)\n```" },
  complete: { text: "class Point:\n    def __init__(self, x, y):\n        self.x = x\n" +
    "        self.y = y\n\n    def __add__(self, other):\n        return Point(self.x + other.x, self.y + other.y)\n\n" +
    "    def __sub__(self, other):\n" },
  infill: { before: "class Stack:\n    def __init__(self):\n        self.items = []\n\n    def push(self, item):\n",
    after: "\n\n    def pop(self):\n        return self.items.pop()\n" },
};
const SAVED_EVERY = 2000; // ms; what is kept of an answer whose tab is closed

/** The fields of every request. */
function common() {
  const given = $("seed").value, boxes = [...$("datastores").querySelectorAll("input")];
  const body = {
    stream: true,
    return_progress: true,
    max_tokens: Math.max(1, Math.trunc(Number($("max-tokens").value)) || 1024),
    seed: given === "" ? Math.floor(Math.random() * 2 ** 31) : Math.trunc(Number(given)), // chosen here, so that an answer can be repeated
    rest_local: { origins: true, ...($("policy").value && { policy: $("policy").value }) },
  };
  for (const [id, name] of [["temperature", "temperature"], ["top-p", "top_p"], ["top-k", "top_k"], ["min-p", "min_p"], ["repeat-penalty", "repeat_penalty"]]) {
    if ($(id).value !== "" && Number.isFinite(Number($(id).value))) body[name] = Number($(id).value);
  }
  if (body.top_k !== undefined) body.top_k = Math.trunc(body.top_k);
  if (body.temperature < 0) body.temperature = 0;
  if (server.chosen) body.model = server.chosen;
  if (boxes.some(box => !box.checked)) body.datastore = boxes.filter(box => box.checked).map(box => box.value);
  if ($("prediction").value) body.prediction = { type: "content", content: $("prediction").value };
  return body;
}

const ONCE = { // calls without a conversation
  complete: {
    path: "/completion",
    ready: () => $("text").value,
    prepare: () => ({ fields: { prompt: $("text").value }, given: $("text").value, follows: "", grow: "text" }),
  },
  infill: {
    path: "/infill",
    ready: () => $("before").value || $("after").value,
    prepare: () => ({
      fields: { input_prefix: $("before").value, input_suffix: $("after").value },
      given: $("before").value, follows: $("after").value, grow: "before",
    }),
  },
};

const waits = disabled => {
  for (const each of document.querySelectorAll(".send, button.idle")) each.disabled = disabled;
};

/** Sends a request and feeds the answer. Returns the finish reason, or "stopped". Throws Problem. */
async function generate(answer, changed, of = null) {
  const aborts = new AbortController();
  running = { answer, talk: of, abort: () => aborts.abort() };
  document.body.dataset.running = "";
  waits(true);
  try {
    const { path, body } = answer.request;
    const response = await call(path, { method: "POST", body: JSON.stringify(body), signal: aborts.signal });
    for await (const chunk of eventsOf(response)) {
      changed(answer.take(chunk));
    }
    if (!answer.reason) throw new Problem("The connection ended before the answer did.");
    return answer.reason;
  } catch (error) {
    if (error.name === "AbortError") return "stopped";
    throw error;
  } finally {
    running = null;
    if (document.activeElement === $("stop")) { // it is about to be hidden
      document.querySelector("[role=tabpanel]:not([hidden]) form textarea").focus();
    }
    delete document.body.dataset.running;
    waits(false);
  }
}

/** Says what the server does for an answer; nothing for null. `of`: its conversation. */
function showState(answer, of = null) {
  const reads = answer && answer.reads;
  $("reading").hidden = !reads;
  if (reads) Object.assign($("reading"), { max: answer.progress.total, value: answer.progress.processed });
  const where = answer && of && of !== talk ? ` in “${oneLine(of.row.title, 30)}”` : "";
  $("status").textContent = answer ? `${stateOf(answer)}${where}` : "";
}

/** Lets an answer grow on the page. `save`, of a conversation: keeps what there is of it. Shows every problem. */
async function perform(answer, log, { talk: of = null, save = null } = {}) {
  say(noticed && noticed.code === "storage" ? noticed : null);
  log.setAttribute("aria-busy", "true"); // screen readers are given sentences, not each token
  answer.foot.scrollIntoView({ block: "nearest" });
  followed = { log, answer, top: 0 };
  $("spoken").replaceChildren();
  showState(answer, of);
  shown = answer;
  repaint();
  const speaker = answer.sheet ? new Speaker() : null;
  let saved = performance.now();
  const keep = () => save && (answer.content || answer.thought || answer.reason) ? save() : null;
  try {
    const how = await generate(answer, text => {
      showState(answer, of);
      repaint();
      if (speaker) speaker.add(text);
      if (!save || performance.now() < saved + SAVED_EVERY) return;
      saved = performance.now();
      save();
    }, of);
    answer.finish(how);
    learnPlain(answer);
    await keep(); // "Done" says that it is kept, too
    if (speaker) speaker.add("", true);
    announce(how === "stopped" ? "Stopped" : "Done"); // the end of the answer shows it
  } catch (problem) {
    answer.finish("failed");
    if (speaker) speaker.add("", true);
    await keep(); // what came is there after a reload that follows the message at once
    say(problem);
    if (problem.code === "key") $("key").focus();
  }
  showState(null);
  log.setAttribute("aria-busy", "false");
  repaint();
}

/** Completes a text or fills a gap. */
async function once(mode) {
  const { path, ready, prepare } = ONCE[mode];
  if (running || !ready()) return;
  const log = $(mode).querySelector(".log"), { fields, given, follows, grow } = prepare(), empty = log.querySelector(".empty");
  const answer = new Answer({ path, body: { ...fields, ...common() }, model: server.model }, given, follows);
  empty.hidden = true;
  for (const old of log.querySelectorAll("article")) old.remove();
  log.append(answer.element);
  await perform(answer, log);
  if (!answer.content && !answer.reason) {
    answer.element.remove();
    empty.hidden = false;
    return;
  }
  if (answer.reason && answer.drafts) {
    const again = button("Run again without drafting", () => compare(answer, again));
    again.classList.add("idle");
    answer.tools.append(again);
  }
  if (answer.content) {
    answer.tools.append(button("Add to the text", () => {
      $(grow).value = given + answer.content;
      $(grow).focus();
    }));
  }
  const copy = copyButton(() => answer.content, "Copy this text");
  if (copy) answer.tools.append(copy);
}

// ---- Against plain decoding --------------------------------------------------------------------------------------

async function compare(drafted, again) {
  if (running) return;
  say(null);
  const { path, body, model } = drafted.request;
  const plain = new Answer({ path, body: { ...body, rest_local: { ...body.rest_local, policy: "off" } }, model });
  const bars = [make("i", "drafted"), make("i")], figures = [make("span"), make("span")], verdict = make("p");
  const race = make("div", "race", "drafted", bars[0], figures[0], "plain", bars[1], figures[1]);
  const text = make("details", "", make("summary", "", "Text without drafting"), plain.text);
  const old = drafted.element.querySelector(".versus");
  const card = make("div", "versus", race, verdict, text);
  if (old) old.replaceWith(card);
  else drafted.element.append(card);
  card.scrollIntoView({ block: "nearest" });
  const draw = () => {
    const fastest = Math.max(drafted.speed, plain.speed) || 1;
    [drafted, plain].forEach((answer, n) => {
      bars[n].style.width = `${100 * answer.speed / fastest}%`;
      figures[n].textContent = answer.speed ? `${speedText(answer.speed)} tokens/s` : "";
    });
  };
  draw();
  verdict.textContent = "Running without drafting";
  try {
    const how = await generate(plain, draw);
    plain.finish(how);
    draw();
    learnPlain(plain);
    if (plain.speed && how !== "stopped") drafted.plainMs = 1000 / plain.speed;
    verdict.textContent = how === "stopped" ? "Stopped." : judged(drafted, plain);
    announce(verdict.textContent);
  } catch (problem) {
    card.remove();
    say(problem);
  }
  repaint();
  card.scrollIntoView({ block: "nearest" });
  again.focus({ preventScroll: true });
}

function judged(drafted, plain) {
  const times = plain.speed ? drafted.speed / plain.speed : 0;
  const speed = times ? `Drafting was ${number(times, 2)} times as fast as plain decoding. ` : "";
  if (drafted.content === plain.content) return `${speed}Both texts are the same.`;
  let same = 0;
  while (drafted.content[same] === plain.content[same]) same += 1;
  return `${speed}The texts part after ${number(same)} characters: there two tokens were as good as equally likely, and ` +
    "rounding decided. The option --exact of the server rules that out.";
}

for (const form of document.querySelectorAll("form[data-mode]")) {
  const { mode } = form.dataset, start = () => mode === "chat" ? ask() : once(mode);
  form.addEventListener("submit", event => {
    event.preventDefault();
    if (document.activeElement.classList.contains("send")) form.querySelector("textarea").focus();
    start();
  });
  form.addEventListener("keydown", event => {
    // A phone's keyboard has no key for a new line but Enter.
    const sends = mode === "chat" ? !event.shiftKey && !matchMedia("(pointer: coarse)").matches : event.ctrlKey || event.metaKey;
    if (event.key !== "Enter" || !sends || event.isComposing || event.target.tagName !== "TEXTAREA") return;
    event.preventDefault();
    start();
  });
}
$("stop").addEventListener("click", () => running && running.abort());

for (const each of document.querySelectorAll("[data-example]")) {
  each.addEventListener("click", () => {
    const texts = EXAMPLES[each.dataset.example];
    for (const [id, text] of Object.entries(texts)) $(id).value = text;
    $(Object.keys(texts)[0]).focus();
  });
}
