"use strict";
// The list of kept conversations: opening, renaming, deleting.

let rows = []; // all conversations, the newest first
let removed = []; // what "Undo" brings back

async function listConversations() {
  rows = await store.list();
  const focused = document.activeElement.dataset.id;
  $("conversations").replaceChildren(...rows.map(row => {
    const open = make("button", "entry", make("span", "name", oneLine(row.title, 80)), make("span", "small", dayOf(row.changed)));
    open.type = "button";
    open.dataset.id = row.id;
    open.addEventListener("click", () => openConversation(row.id));
    return make("li", "", open);
  }));
  markOpen();
  if (focused) [...$("conversations").querySelectorAll("button")].find(each => each.dataset.id === focused)?.focus();
  $("delete-all").disabled = !rows.length;
}

/** Show what has changed in the store, or why it stores nothing. */
function followStore() {
  const { problem } = store;
  $("kept").textContent = problem || "Conversations are kept in this browser only.";
  $("kept").classList.toggle("alarm", Boolean(problem));
  if (problem) say(new Problem(problem, "storage"));
  else if (noticed && noticed.code === "storage") say(null);
  return listConversations();
}
store.addEventListener("change", followStore);
addEventListener("focus", listConversations); // another tab may have written

function dayOf(time) {
  const day = new Date(time), today = new Date().toDateString() === day.toDateString();
  return day.toLocaleString([], today ? { hour: "2-digit", minute: "2-digit" } : { day: "numeric", month: "short" });
}

/** Return a conversation as this tab knows it: the one that is answered is newer than what is stored of it. */
const conversationOf = id => running && running.talk?.row.id === id ? running.talk : store.load(id);

async function openConversation(id, focus = true) {
  const found = await conversationOf(id);
  if (!found) return;
  select("chat");
  show(found);
  closePanel("list");
  if (focus) $("message").focus();
}

function fresh() {
  select("chat");
  if (talk.messages.length) show(newTalk());
  $("status").textContent = "";
  closePanel("list");
  $("message").focus();
}
$("fresh").addEventListener("click", fresh);

$("conversations").addEventListener("keydown", event => {
  const { id } = event.target.dataset, all = [...$("conversations").querySelectorAll("button")], at = all.indexOf(event.target);
  if (event.altKey || event.ctrlKey || event.metaKey || at < 0) return;
  const to = { ArrowDown: at + 1, ArrowUp: at - 1, Home: 0, End: all.length - 1 }[event.key];
  if (to !== undefined) all[Math.max(0, Math.min(to, all.length - 1))].focus();
  else if (event.key === "Delete") discard([id]);
  else if (event.key === "F2") openConversation(id, false).then(() => $("title").select());
  else return;
  event.preventDefault();
});

$("title").addEventListener("change", () => {
  talk.row.title = $("title").value.trim() || talk.row.title;
  render();
  store.save(talk, []);
});
$("title").addEventListener("keydown", event => {
  if (event.key !== "Enter" && event.key !== "Escape" || event.isComposing) return;
  event.preventDefault();
  event.stopPropagation();
  if (event.key === "Escape") render(); // the old title
  $("message").focus();
});

async function discard(ids) {
  const title = ids.length === 1 ? `“${oneLine(rows.find(row => row.id === ids[0]).title, 30)}”` : counted(ids.length, "conversation");
  removed = (await Promise.all(ids.map(conversationOf))).filter(Boolean);
  for (const each of removed) each.deleted = running && running.talk === each; // its answer is not kept
  if (removed.some(each => each.deleted)) running.abort();
  await store.remove(ids);
  if (ids.includes(talk.row.id)) show(newTalk());
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
$("delete").addEventListener("click", () => discard([talk.row.id]));
$("delete-all").addEventListener("click", () => discard(rows.map(row => row.id)));
