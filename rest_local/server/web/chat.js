"use strict";
// The conversation that is open: its messages on the page, asking, editing and answering anew.

const store = new Store();
const newTalk = () => ({ row: { id: newId(), title: "", system: "", created: now(), changed: now() }, messages: [] });
let talk = newTalk(); // the open conversation
let views = new Map(); // id of a message -> { element, tools, answer or asked }
const answersHere = new Map(); // id of a message -> its Answer, if this tab has written it: all of its steps are known
const chatLog = $("chat").querySelector(".log");

const USER_SHOWN = 20_000; // characters of a question that are shown

/** Show another conversation, or a new one. */
function show(other) {
  talk = other;
  views = new Map();
  $("system").value = talk.row.system;
  for (const child of chatLog.querySelectorAll(":scope > :not(.empty)")) child.remove();
  stored("sessionStorage", "rest-local-open", talk.row.id);
  if (!running) $("status").textContent = "";
  render();
  markOpen();
  shown = talk.messages.map(each => views.get(each.id).answer).findLast(Boolean) || null;
  repaint();
  chatLog.lastElementChild.scrollIntoView({ block: "end" });
}

/** Mark the open conversation in the list. */
function markOpen() {
  for (const row of $("conversations").querySelectorAll("button")) {
    if (row.dataset.id === talk.row.id) row.setAttribute("aria-current", "true");
    else row.removeAttribute("aria-current");
  }
}

/** Bring the page to what `talk` says. Elements that stay are not moved, so that the focus stays too. */
function render() {
  const { row, messages } = talk, elements = messages.map(viewOf), wanted = new Set(elements);
  const empty = chatLog.querySelector(".empty");
  for (const child of [...chatLog.children]) if (child !== empty && !wanted.has(child)) child.remove();
  elements.forEach((element, place) => {
    if (chatLog.children[place + 1] !== element) chatLog.insertBefore(element, chatLog.children[place + 1] || null);
  });
  empty.hidden = messages.length > 0;
  messages.forEach(tools);
  paintBlocks();
  $("title-row").hidden = !messages.length;
  $("title").value = oneLine(row.title, 200);
  document.title = messages.length ? `${oneLine(row.title, 60)} – rest-local` : "rest-local";
}

function viewOf(message) {
  const known = views.get(message.id);
  if (known) return known.element;
  const view = message.role === "user" ? userView(message) : answerView(answersHere.get(message.id) || Answer.from(message));
  views.set(message.id, view);
  return view.element;
}

const answerView = answer => ({ element: answer.element, tools: answer.tools, answer });

function userView(message) {
  const end = make("span"), asked = make("div", "asked", end, make("span")), row = make("div", "tools small"), files = make("ul", "files");
  const more = message.content.length - USER_SHOWN;
  const sheet = new Sheet(asked, end, true);
  sheet.write(message.content.slice(0, USER_SHOWN));
  sheet.finish();
  if (more > 0) asked.append(make("p", "left hint", `… and ${counted(more, "character")} more, which the model gets too.`));
  files.append(...(message.files || []).map(file => make("li", "", chipOf(file))));
  files.setAttribute("aria-label", "Attached files");
  const element = make("section", "turn", asked, ...(files.childElementCount ? [files] : []), row);
  element.setAttribute("aria-label", "Your message");
  return { element, tools: row, asked };
}

/** Make the buttons below a message. */
function tools(message) {
  const view = views.get(message.id), { answer } = view, asks = message.role === "user", isLast = message === talk.messages.at(-1);
  const made = [];
  const busy = (text, act) => {
    const each = button(text, act);
    each.classList.add("idle");
    each.disabled = Boolean(running);
    made.push(each);
  };
  const copy = copyButton(() => asks ? message.content : (answer.content || message.content), `Copy this ${asks ? "message" : "answer"}`);
  if (copy) made.push(copy);
  if (asks) {
    busy("Edit", () => edit(message));
    if (isLast && !running) busy("Answer", () => respond(talk.messages));
  } else if (!(running && running.answer === answer)) {
    if (isLast) busy("Regenerate", regenerate);
    if (answer.how && answer.how !== "failed" && answer.drafts && answer.request.body.stream) {
      busy("Run again without drafting", async event => {
        const of = talk;
        await compare(answer, event.target);
        await store.save(of, [Object.assign(message, answer.kept())]);
      });
    }
  }
  const focused = view.tools.contains(document.activeElement) ? nameOf(document.activeElement) : "";
  view.tools.replaceChildren(...made);
  if (focused) (made.find(each => nameOf(each) === focused) || chatLog).focus();
}

const nameOf = each => each.getAttribute("aria-label") || each.textContent;

// ---- Asking ------------------------------------------------------------------------------------------------------

/** Return the text between fences that it does not contain. */
function fenced(text, info) {
  const longest = Math.max(2, ...[...text.matchAll(/`+/g)].map(found => found[0].length));
  const ticks = "`".repeat(longest + 1);
  return `${ticks}${info}\n${text}${text.endsWith("\n") ? "" : "\n"}${ticks}`;
}

/** Return the text of a message, with its attached files and their names first. */
function textOf({ content, files = [] }) {
  const texts = files.filter(file => file.kind === "text");
  const parts = texts.map(file => `${file.name}:\n${fenced(file.text, /\.(\w{1,12})$/.exec(file.name)?.[1] || "")}\n`);
  return [...parts, ...(content || !parts.length ? [content] : [])].join("\n");
}

function sentMessages({ row, messages }) {
  const sent = messages.map(message => {
    const text = textOf(message), images = (message.files || []).filter(file => file.kind === "image");
    const parts = images.map(image => ({ type: "image_url", image_url: { url: image.url } }));
    return { role: message.role, content: images.length ? [...parts, { type: "text", text }] : text };
  });
  return row.system.trim() ? [{ role: "system", content: row.system }, ...sent] : sent;
}

const question = (content, files) =>
  ({ id: newId(), conversation: talk.row.id, role: "user", content, files, created: now() });
const titleOf = (content, files) => (content.trim().split("\n", 1)[0] || files[0].name).slice(0, 80);

function ask() {
  const content = $("message").value, files = attached;
  if (running || !content.trim() && !files.length) return;
  if (!talk.messages.length) talk.row.title = titleOf(content, files);
  $("message").value = "";
  attached = [];
  showAttached();
  respond([...talk.messages, question(content, files)], () => {
    $("message").value = $("message").value || content;
    if (!attached.length) attached = files;
    showAttached();
  });
}

/** Let the user write another version of a message. It replaces the old one and all that follows. */
function edit(message, text = message.content) {
  const { asked, element } = views.get(message.id), field = make("textarea"), act = make("div", "act");
  if (element.querySelector("textarea")) return;
  field.value = text;
  field.rows = Math.min(12, text.split("\n").length + 1);
  field.setAttribute("aria-label", "Another version of this message");
  const close = () => {
    field.remove();
    act.remove();
    asked.hidden = false;
    [...element.querySelectorAll(".tools button")].find(each => each.textContent === "Edit")?.focus();
  };
  const send = () => {
    if (running || !field.value.trim() && !(message.files || []).length) return;
    const before = talk.messages.slice(0, talk.messages.indexOf(message)), version = question(field.value, message.files);
    close();
    $("message").focus();
    respond([...before, version], () => edit(message, version.content));
  };
  field.addEventListener("keydown", event => {
    if (event.isComposing) return;
    if (event.key === "Enter" && !event.shiftKey) { event.preventDefault(); send() }
    if (event.key === "Escape") { event.stopPropagation(); close() }
  });
  act.append(button("Send", send), button("Cancel", close));
  act.append(make("span", "hint", "The new version replaces this message and everything below it."));
  asked.hidden = true;
  asked.after(field, act);
  field.focus();
}

/** Answer the newest message anew. */
function regenerate() {
  const { messages } = talk, asked = messages.findLastIndex(each => each.role === "user");
  if (!running && messages.at(-1)?.role === "assistant") respond(messages.slice(0, asked + 1));
}

/** Let the model answer `messages`, which become the open conversation. The messages that they replace are deleted when
    the first word comes. If none comes, they are back, and `undo` is called. */
async function respond(messages, undo = () => {}) {
  if (running) return;
  const asked = talk, before = talk.messages;
  const added = messages.filter(each => !before.includes(each)), dropped = before.filter(each => !messages.includes(each)).map(each => each.id);
  const body = { messages: sentMessages({ row: asked.row, messages }), ...common() };
  const answer = new Answer({ path: CHAT, body, model: server.model });
  const message = { id: newId(), conversation: asked.row.id, role: "assistant", created: now(), ...answer.kept() };
  answersHere.set(message.id, answer);
  asked.messages = [...messages, message];
  asked.row.changed = now();
  stored("sessionStorage", "rest-local-open", asked.row.id);
  render();
  if (added.length) store.save(asked, added);
  await perform(answer, chatLog, { talk: asked, save: async () => {
    if (!asked.deleted) await store.save(asked, [Object.assign(message, answer.kept())], dropped);
  } });
  if (!answer.content && !answer.thought && !answer.reason && !asked.deleted) {
    asked.messages = before;
    if (before.length) store.save(asked, [], added.map(each => each.id));
    else store.remove([asked.row.id]);
  }
  if (talk !== asked) return;
  render();
  if (asked.messages === before) undo();
}
