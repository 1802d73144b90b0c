// The conversation that is open: its messages on the page, asking, editing and answering anew.

import { $, button, copyButton, counted, field, make, oneLine, stored, within } from "./dom.js";
import { newId, now, store } from "./store.js";
import { state } from "./state.js";
import { paintBlocks } from "./colours.js";
import { seen, Sheet } from "./markdown.js";
import { Answer, CHAT } from "./answer.js";
import { repaint } from "./figures.js";
import { server } from "./server.js";
import { attached, chipOf, setAttached } from "./files.js";
import { common, perform } from "./generate.js";
import { compare } from "./compare.js";

/** @import { AttachedFile, Conversation, Message, Question, Reply } from "./types.js" */
/** @typedef {{ element: HTMLElement, tools: HTMLElement, answer?: Answer, asked?: HTMLElement }} View */

/** The elements of each message of the open conversation, by its id.
    @type {Map<string, View>} */
let views = new Map();
/** The answers that this tab has written, by the ids of their messages. All of their steps are known.
    @type {Map<string, Answer>} */
const answersHere = new Map();
const chatLog = within($("chat"), ".log");

const USER_SHOWN = 20_000; // characters of a question that are shown

/** Show another conversation, or a new one.
    @param {Conversation} other */
export function show(other) {
  state.talk = other;
  views = new Map();
  field("system").value = state.talk.row.system;
  for (const child of chatLog.querySelectorAll(":scope > :not(.empty)")) child.remove();
  stored("sessionStorage", "rest-local-open", state.talk.row.id);
  if (!state.running) $("status").textContent = "";
  render();
  markOpen();
  state.shown = state.talk.messages.map(each => views.get(each.id)?.answer).findLast(Boolean) || null;
  repaint();
  chatLog.lastElementChild?.scrollIntoView({ block: "end" });
}

/** Mark the open conversation in the list. */
export function markOpen() {
  for (const row of $("conversations").querySelectorAll("button")) {
    if (row.dataset.id === state.talk.row.id) row.setAttribute("aria-current", "true");
    else row.removeAttribute("aria-current");
  }
}

/** Bring the page to the open conversation. Elements that stay are not moved, so that the focus stays too. */
export function render() {
  const { row, messages } = state.talk, elements = messages.map(viewOf);
  const empty = within(chatLog, ".empty");
  for (const child of [...chatLog.children]) if (child !== empty && !elements.some(each => each === child)) child.remove();
  elements.forEach((element, place) => {
    if (chatLog.children[place + 1] !== element) chatLog.insertBefore(element, chatLog.children[place + 1] || null);
  });
  empty.hidden = messages.length > 0;
  messages.forEach(showTools);
  paintBlocks();
  $("title-row").hidden = !messages.length;
  field("title").value = oneLine(row.title, 200);
  document.title = messages.length ? `${oneLine(row.title, 60)} – rest-local` : "rest-local";
}

/** Return the element of a message.
    @param {Message} message */
function viewOf(message) {
  const view = views.get(message.id) || (message.role === "user" ? userView(message) : answerView(message));
  views.set(message.id, view);
  return view.element;
}

/** @param {Reply} message @returns {View} */
function answerView(message) {
  const answer = answersHere.get(message.id) || Answer.from(message);
  return { element: answer.element, tools: answer.tools, answer };
}

/** @param {Question} message @returns {View} */
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

/** Show the buttons below a message.
    @param {Message} message */
function showTools(message) {
  const { tools, answer } = /** @type {View} */ (views.get(message.id)), isLast = message === state.talk.messages.at(-1);
  /** @type {HTMLElement[]} */
  const made = [];
  const busy = (/** @type {string} */ text, /** @type {(event: MouseEvent) => unknown} */ act) => {
    const each = button(text, act);
    each.classList.add("idle");
    each.disabled = Boolean(state.running);
    made.push(each);
  };
  const copy = copyButton(() => answer?.content || message.content, `Copy this ${answer ? "answer" : "message"}`);
  if (copy) made.push(copy);
  if (message.role === "user") {
    busy("Edit", () => edit(message));
    if (isLast && !state.running) busy("Answer", () => respond(state.talk.messages));
  } else if (answer && state.running?.answer !== answer) {
    if (isLast) busy("Regenerate", regenerate);
    if (answer.how && answer.how !== "failed" && answer.drafts && answer.request.body.stream) {
      busy("Run again without drafting", async event => {
        const { talk } = state;
        await compare(answer, /** @type {HTMLElement} */ (event.target));
        await store.save(talk, [Object.assign(message, answer.kept())]);
      });
    }
  }
  const focused = document.activeElement && tools.contains(document.activeElement) ? nameOf(document.activeElement) : "";
  tools.replaceChildren(...made);
  if (focused) (made.find(each => nameOf(each) === focused) || chatLog).focus();
}

/** @param {Element} each */
const nameOf = each => each.getAttribute("aria-label") || each.textContent;

// ---- Asking ------------------------------------------------------------------------------------------------------

/** Return the text between fences that it does not contain.
    @param {string} text @param {string} info */
function fenced(text, info) {
  const longest = Math.max(2, ...[...text.matchAll(/`+/g)].map(found => found[0].length));
  const ticks = "`".repeat(longest + 1);
  return `${ticks}${info}\n${text}${text.endsWith("\n") ? "" : "\n"}${ticks}`;
}

/** Return the text of a message, with its attached files and their names first.
    @param {string} content @param {AttachedFile[]} files */
function textOf(content, files) {
  const texts = files.filter(file => file.kind === "text");
  const parts = texts.map(file => `${file.name}:\n${fenced(file.text, /\.(\w{1,12})$/.exec(file.name)?.[1] || "")}\n`);
  return [...parts, ...(content || !parts.length ? [content] : [])].join("\n");
}

/** Return messages as a request has them.
    @param {string} system @param {Message[]} messages */
function sentMessages(system, messages) {
  const sent = messages.map(message => {
    const files = message.role === "user" && message.files || [], text = textOf(message.content, files);
    const images = files.filter(file => file.kind === "image").map(image => ({ type: "image_url", image_url: { url: image.url } }));
    return { role: message.role, content: images.length ? [...images, { type: "text", text }] : text };
  });
  return system.trim() ? [{ role: "system", content: system }, ...sent] : sent;
}

/** @param {string} content @param {AttachedFile[]} [files] @returns {Question} */
const question = (content, files) =>
  ({ id: newId(), conversation: state.talk.row.id, role: "user", content, files, created: now() });
/** @param {string} content @param {AttachedFile[]} files */
const titleOf = (content, files) => (content.trim().split("\n", 1)[0] || files[0].name).slice(0, 80);

/** Send the message that was written. */
export function ask() {
  const content = field("message").value, files = attached();
  if (state.running || !content.trim() && !files.length) return;
  if (!state.talk.messages.length) state.talk.row.title = titleOf(content, files);
  field("message").value = "";
  setAttached([]);
  respond([...state.talk.messages, question(content, files)], () => {
    field("message").value ||= content;
    if (!attached().length) setAttached(files);
  });
}

/** Let the user write another version of a message. It replaces the old one and all that follows.
    @param {Question} message */
function edit(message, text = message.content) {
  const { asked, element } = views.get(message.id) || {}, version = make("textarea"), act = make("div", "act");
  if (!asked || !element || element.querySelector("textarea")) return;
  version.value = text;
  version.rows = Math.min(12, text.split("\n").length + 1);
  version.setAttribute("aria-label", "Another version of this message");
  const close = () => {
    version.remove();
    act.remove();
    asked.hidden = false;
    /** @type {NodeListOf<HTMLElement>} */
    const buttons = element.querySelectorAll(".tools button");
    [...buttons].find(each => each.textContent === "Edit")?.focus();
  };
  const send = () => {
    if (state.running || !version.value.trim() && !(message.files || []).length) return;
    const before = state.talk.messages.slice(0, state.talk.messages.indexOf(message)), next = question(version.value, message.files);
    close();
    $("message").focus();
    respond([...before, next], () => edit(message, next.content));
  };
  version.addEventListener("keydown", event => {
    if (event.isComposing) return;
    if (event.key === "Enter" && !event.shiftKey) { event.preventDefault(); send() }
    if (event.key === "Escape") { event.stopPropagation(); close() }
  });
  act.append(button("Send", send), button("Cancel", close));
  act.append(make("span", "hint", "The new version replaces this message and everything below it."));
  asked.hidden = true;
  asked.after(version, act);
  version.focus();
}

/** Edit the newest message of the user. */
export function editNewest() {
  const message = state.talk.messages.findLast(each => each.role === "user");
  if (message?.role === "user" && !state.running) edit(message);
}

/** Focus a token of the newest answer. */
export function focusAnswer() {
  const answer = state.talk.messages.map(each => views.get(each.id)?.answer).findLast(Boolean), token = answer?.stop && seen(answer.stop);
  token?.focus();
}

/** Answer the newest message anew. */
export function regenerate() {
  const { messages } = state.talk;
  if (messages.at(-1)?.role === "assistant") respond(messages.slice(0, -1));
}

/** Let the model answer `messages`, which become the open conversation. The messages that they replace are deleted when
    the first word comes. If none comes, they are back, and `undo` is called.
    @param {Message[]} messages */
async function respond(messages, undo = () => {}) {
  if (state.running) return;
  const asked = state.talk, before = state.talk.messages;
  const added = messages.filter(each => !before.includes(each)), dropped = before.filter(each => !messages.includes(each)).map(each => each.id);
  const body = { messages: sentMessages(asked.row.system, messages), ...common() };
  const answer = new Answer({ path: CHAT, body, model: server.model });
  /** @type {Reply} */
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
  if (state.talk !== asked) return;
  render();
  if (asked.messages === before) undo();
}
