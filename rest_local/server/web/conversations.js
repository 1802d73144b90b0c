// The list of kept conversations: opening, renaming, deleting.

import { $, button, counted, field, make, oneLine, Problem } from "./dom.js";
import { newConversation, store } from "./store.js";
import { state } from "./state.js";
import { closePanel, openPanel, select, WITH_LIST } from "./frame.js";
import { noticed, say } from "./server.js";
import { markOpen, render, show } from "./chat.js";

/** @import { Conversation, Row } from "./types.js" */

/** All conversations, the newest first.
    @type {Row[]} */
let rows = [];
/** What "Undo" brings back.
    @type {Conversation[]} */
let removed = [];
const listed = () => [...$("conversations").querySelectorAll("button")];

async function listConversations() {
  rows = await store.list();
  const focused = document.activeElement instanceof HTMLElement && document.activeElement.dataset.id;
  $("conversations").replaceChildren(...rows.map(row => {
    const open = make("button", "entry", make("span", "name", oneLine(row.title, 80)), make("span", "small", dayOf(row.changed)));
    open.type = "button";
    open.dataset.id = row.id;
    open.addEventListener("click", () => openConversation(row.id));
    return make("li", "", open);
  }));
  markOpen();
  if (focused) listed().find(each => each.dataset.id === focused)?.focus();
  $("delete-all").toggleAttribute("disabled", !rows.length);
}

/** Show what has changed in the store, or why it stores nothing. */
export function followStore() {
  const { problem } = store;
  $("kept").textContent = problem || "Conversations are kept in this browser only.";
  $("kept").classList.toggle("alarm", Boolean(problem));
  if (problem) say(new Problem(problem, "storage"));
  else if (noticed?.code === "storage") say(null);
  return listConversations();
}
store.addEventListener("change", followStore);
addEventListener("focus", listConversations); // another tab may have written

/** @param {number} time */
function dayOf(time) {
  const day = new Date(time), today = new Date().toDateString() === day.toDateString();
  return day.toLocaleString([], today ? { hour: "2-digit", minute: "2-digit" } : { day: "numeric", month: "short" });
}

/** Return a conversation as this tab knows it: the one that is answered is newer than what is stored of it.
    @param {string} id */
const conversationOf = async id => state.running?.talk?.row.id === id ? state.running.talk : store.load(id);

/** @param {string} id */
export async function openConversation(id, focus = true) {
  const found = await conversationOf(id);
  if (!found) return;
  select("chat");
  show(found);
  closePanel("list");
  if (focus) $("message").focus();
}

/** Begin a new conversation. */
export function fresh() {
  select("chat");
  if (state.talk.messages.length) show(newConversation());
  $("status").textContent = "";
  closePanel("list");
  $("message").focus();
}
$("fresh").addEventListener("click", fresh);

$("conversations").addEventListener("keydown", event => {
  const all = listed(), at = all.findIndex(each => each === event.target), id = all[at]?.dataset.id;
  if (event.altKey || event.ctrlKey || event.metaKey || !id) return;
  /** @type {Record<string, number>} */
  const moves = { ArrowDown: at + 1, ArrowUp: at - 1, Home: 0, End: all.length - 1 };
  const to = moves[event.key];
  if (to !== undefined) all[Math.max(0, Math.min(to, all.length - 1))].focus();
  else if (event.key === "Delete") discard([id]);
  else if (event.key === "F2") openConversation(id, false).then(() => field("title").select());
  else return;
  event.preventDefault();
});

$("title").addEventListener("change", () => {
  state.talk.row.title = field("title").value.trim() || state.talk.row.title;
  render();
  store.save(state.talk, []);
});
$("title").addEventListener("keydown", event => {
  if (event.key !== "Enter" && event.key !== "Escape" || event.isComposing) return;
  event.preventDefault();
  event.stopPropagation();
  if (event.key === "Escape") render(); // the old title
  $("message").focus();
});

/** Delete conversations, and offer to bring them back.
    @param {string[]} ids */
async function discard(ids) {
  const title = ids.length === 1 ? `“${oneLine(rows.find(row => row.id === ids[0])?.title || "", 30)}”` : counted(ids.length, "conversation");
  removed = (await Promise.all(ids.map(conversationOf))).filter(each => each !== null);
  for (const each of removed) each.deleted = state.running?.talk === each; // its answer is not kept
  if (removed.some(each => each.deleted)) state.running?.abort();
  await store.remove(ids);
  if (ids.includes(state.talk.row.id)) show(newConversation());
  const undo = button("Undo", async () => {
    $("undo").replaceChildren();
    for (const each of removed.splice(0)) {
      each.deleted = false;
      await store.save(each, each.messages);
      if (ids.length === 1) openConversation(each.row.id);
    }
  });
  $("undo").replaceChildren(make("span", "", `Deleted ${title}. `), undo);
  if (matchMedia(WITH_LIST).matches || $("list").hasAttribute("data-open")) undo.focus();
  else openPanel("list", undo);
}
$("delete").addEventListener("click", () => discard([state.talk.row.id]));
$("delete-all").addEventListener("click", () => discard(rows.map(row => row.id)));
