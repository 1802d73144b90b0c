"use strict";
// The conversation that is open: its messages on the page, its branches, editing and answering anew.

/** A conversation: `row` is what is stored of it, null before its first message. */
const newTalk = () => ({ id: newId(), row: null, messages: new Map(), leaf: null, system: "" });
let talk = newTalk(); // the open one
let views = new Map(); // id of a message -> { element, stamp, tools }
const written_here = new Map(); // id of an answer -> Answer that this tab wrote, with all of its steps
const chatLog = $("chat").querySelector(".log");

const USER_SHOWN = 20_000; // characters of a question that are shown

/** Shows another conversation, or a new one. */
function show(other) {
  talk = other;
  views = new Map();
  $("system").value = talk.system;
  for (const child of chatLog.querySelectorAll(":scope > :not(.empty)")) child.remove();
  stored("sessionStorage", "rest-local-open", talk.row ? talk.id : "");
  if (!running) $("status").textContent = "";
  render();
  markOpen();
  const answers = pathTo(talk.messages, talk.leaf).filter(each => each.role === "assistant" && views.get(each.id).answer);
  shown = answers.length ? views.get(answers.at(-1).id).answer : null;
  repaint();
  chatLog.lastElementChild.scrollIntoView({ block: "end" });
}

/** Brings the page to what `talk` says. Elements that stay are not moved, so that the focus stays too. */
function render() {
  const path = pathTo(talk.messages, talk.leaf), elements = path.map(viewOf), wanted = new Set(elements);
  const empty = chatLog.querySelector(".empty");
  for (const child of [...chatLog.children]) if (child !== empty && !wanted.has(child)) child.remove();
  elements.forEach((element, place) => {
    if (chatLog.children[place + 1] !== element) chatLog.insertBefore(element, chatLog.children[place + 1] || null);
  });
  empty.hidden = path.length > 0;
  path.forEach(tools);
  paintBlocks();
  $("title-row").hidden = !talk.row;
  $("title").textContent = talk.row ? oneLine(talk.row.title, 120) : "";
  document.title = talk.row ? `${oneLine(talk.row.title, 60)} – rest-local` : "rest-local";
}

/** The element of a message, made anew where another tab has changed the message. */
function viewOf(message) {
  const stamp = `${message.content.length} ${message.reason || ""}`, known = views.get(message.id);
  const mine = written_here.get(message.id);
  if (known && (known.stamp === stamp || mine)) return known.element;
  const view = message.role === "user" ? userView(message) : answerView(mine || Answer.from(message));
  views.set(message.id, { ...view, stamp });
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

/** The buttons below a message. */
function tools(message) {
  const view = views.get(message.id), { answer } = view, of = message.role === "user" ? "message" : "answer";
  const made = [...branches(message)];
  const busy = (text, act) => {
    const each = button(text, act);
    each.classList.add("idle");
    each.disabled = Boolean(running);
    return each;
  };
  const copy = copyButton(() => message.role === "user" ? message.content : (answer.content || message.content), `Copy this ${of}`);
  if (copy) made.push(copy);
  const writing = running && running.answer === answer;
  if (message.role === "user") {
    made.push(busy("Edit", () => edit(message)));
    if (!childrenOf(talk.messages, message.id).length && !running) made.push(busy("Answer", () => respond(message.id)));
  } else if (!writing) {
    made.push(busy("Regenerate", () => respond(message.parent)));
    if (answer.how && answer.how !== "failed" && answer.drafts && answer.request.body.stream) {
      made.push(busy("Run again without drafting", event => compare(answer, event.target)));
    }
  }
  const focused = [...view.tools.children].indexOf(document.activeElement);
  const name = focused >= 0 ? nameOf(document.activeElement) : "";
  view.tools.replaceChildren(...made);
  if (name) (made.flatMap(each => [each, ...each.querySelectorAll("button")]).find(each => nameOf(each) === name) || chatLog).focus();
}

const nameOf = each => each.getAttribute("aria-label") || each.textContent;

// ---- Branches ----------------------------------------------------------------------------------------------------

/** ‹ 2/3 › where a message has other versions. */
function branches(message) {
  const versions = childrenOf(talk.messages, message.parent), at = versions.indexOf(message);
  if (versions.length < 2) return [];
  const step = (by, sign, label) => {
    const made = button(sign, () => toVersion(versions[at + by], label), label);
    made.disabled = !versions[at + by];
    return made;
  };
  const place = make("span", "place-of", `${at + 1}/${versions.length}`);
  place.setAttribute("aria-label", `Version ${at + 1} of ${versions.length}`);
  place.setAttribute("role", "img");
  const group = make("span", "branches", step(-1, "‹", "Previous version"), place, step(1, "›", "Next version"));
  group.setAttribute("role", "group");
  group.setAttribute("aria-label", "Versions");
  return [group];
}

function toVersion(message, label) {
  talk.leaf = newestBelow(talk.messages, message.id);
  render();
  store.save(talk.id, { leaf: talk.leaf }, [], whole(talk));
  const buttons = [...views.get(message.id).tools.querySelectorAll(".branches button")];
  (buttons.find(each => nameOf(each) === label && !each.disabled) || buttons.find(each => !each.disabled)).focus();
}

// ---- Editing -----------------------------------------------------------------------------------------------------

/** Lets the user write another version of a message; the old one stays as a branch. */
function edit(message) {
  const { asked, element } = views.get(message.id), field = make("textarea"), act = make("div", "act");
  if (element.querySelector("textarea")) return;
  field.value = message.content;
  field.rows = Math.min(12, message.content.split("\n").length + 1);
  field.setAttribute("aria-label", "Another version of this message");
  const close = () => {
    field.remove();
    act.remove();
    asked.hidden = false;
    const again = [...element.querySelectorAll(".tools button")].find(each => each.textContent === "Edit");
    if (again) again.focus();
  };
  const send = () => {
    if (running || !field.value.trim() && !(message.files || []).length) return;
    close();
    const version = { ...message, id: newId(), created: now(), content: field.value };
    keep(talk, version);
    $("message").focus();
    respond(version.id);
  };
  field.addEventListener("keydown", event => {
    if (event.isComposing) return;
    if (event.key === "Enter" && !event.shiftKey) { event.preventDefault(); send() }
    if (event.key === "Escape") { event.stopPropagation(); close() }
  });
  act.append(button("Send", send), button("Cancel", close));
  asked.hidden = true;
  asked.after(field, act);
  field.focus();
}

// ---- Asking ------------------------------------------------------------------------------------------------------

/** Adds a message to a conversation, here and in the store. */
function keep(of, message) {
  of.messages.set(message.id, message);
  of.leaf = message.id;
  const fields = { leaf: of.leaf, changed: now(), ...(of.isNew ? of.row : {}) };
  of.isNew = false;
  Object.assign(of.row, fields);
  return store.save(of.id, fields, [message], whole(of)).then(listConversations);
}

/** A conversation as it is stored. */
const whole = of => ({ row: of.row, messages: [...of.messages.values()] });

function ask() {
  const content = $("message").value, files = attached;
  if (running || !content.trim() && !files.length) return;
  const first = !talk.row, before = talk.leaf, asked = talk;
  if (first) Object.assign(talk, { isNew: true, row: { id: talk.id, title: titleOf(content, files), system: talk.system, created: now() } });
  const message = { id: newId(), conversation: talk.id, parent: before, role: "user", content, files, created: now() };
  keep(talk, message);
  $("message").value = "";
  attached = [];
  showAttached();
  stored("sessionStorage", "rest-local-open", talk.id);
  render();
  respond(message.id, () => { // nothing came: as if it had not been sent
    asked.messages.delete(message.id);
    asked.leaf = before;
    if (first) asked.row = null;
    if (talk === asked) render();
    $("message").value = $("message").value || content;
    if (!attached.length) attached = files;
    showAttached();
    if (first) stored("sessionStorage", "rest-local-open", "");
    const gone = first ? store.remove([asked.id]) : store.forget(asked.id, [message.id]);
    gone.then(listConversations);
  });
}

const titleOf = (content, files) => (content.trim().split("\n", 1)[0] || files[0].name).slice(0, 80);

/** Lets the model answer a message. `undo`: what to do where not a word came. */
async function respond(parent, undo = null) {
  if (running) return;
  const asked = talk, path = pathTo(talk.messages, parent), before = talk.leaf;
  const body = { messages: sentMessages(path, talk.system), ...common() };
  const answer = new Answer({ path: CHAT, body, model: server.model });
  const message = { id: newId(), conversation: talk.id, parent, role: "assistant", created: now(), ...answer.kept() };
  written_here.set(message.id, answer);
  talk.messages.set(message.id, message);
  talk.leaf = message.id;
  render();
  const save = () => {
    if (asked.deleted) return;
    Object.assign(message, answer.kept());
    return keep(asked, message);
  };
  await perform(answer, chatLog, { talk: asked, save });
  if (!answer.content && !answer.thought && !answer.reason) {
    asked.messages.delete(message.id);
    written_here.delete(message.id);
    asked.leaf = before;
    if (undo) undo();
  }
  if (talk === asked) render();
}

/** The newest answer below a message that ends a branch, or the message. A question that another tab has asked appears
    here with its answer only, so that nothing from here comes between them. */
function answeredBelow(messages, id) {
  return pathTo(messages, newestBelow(messages, id)).findLast(each => each.role === "assistant" || each.id === id)?.id;
}

/** What another tab has written appears here. */
async function refresh() {
  const asked = talk, rows = await store.messages(asked.id), conversations = await store.list();
  if (talk !== asked || !asked.row) return;
  const busy = running && running.talk === asked;
  const mine = [...asked.messages.values()].filter(each => busy || written_here.has(each.id)); // perhaps not yet stored
  const wasLast = answeredBelow(asked.messages, asked.leaf) === asked.leaf;
  asked.messages = new Map([...mine, ...rows].map(row => [row.id, row]));
  for (const each of mine) asked.messages.set(each.id, each);
  const row = conversations.find(each => each.id === asked.id);
  if (row) asked.row = { ...row, leaf: asked.leaf };
  if (row && row.system !== asked.system && document.activeElement !== $("system")) $("system").value = asked.system = row.system;
  if (!asked.messages.has(asked.leaf)) asked.leaf = newestBelow(asked.messages, null);
  else if (wasLast && !busy) asked.leaf = answeredBelow(asked.messages, asked.leaf);
  render();
}
