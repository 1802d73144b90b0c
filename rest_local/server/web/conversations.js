"use strict";
// The list of kept conversations: opening, renaming, deleting, saving as files, importing.

let rows = []; // all conversations, the newest first
let removed = []; // what "Undo" brings back
const MOST_IMPORTED = 300e6;

const store = new Store(
  async (ids, gone) => {
    if (gone && ids.includes(talk.id) && !(running && running.talk === talk)) {
      show(newTalk());
      $("status").textContent = "This conversation was deleted in another tab";
    } else if (ids.includes(talk.id)) await refresh();
    listConversations();
  },
  text => {
    $("kept").textContent = text || "Conversations are kept in this browser only.";
    $("kept").classList.toggle("alarm", Boolean(text));
    if (text) say(new Problem(text, "storage"));
    else if (noticed && noticed.code === "storage") say(null);
  },
);

async function listConversations() {
  rows = await store.list();
  const wanted = $("find").value.trim().toLowerCase(), focused = document.activeElement.dataset.id;
  const seen = rows.filter(row => row.title.toLowerCase().includes(wanted));
  $("conversations").replaceChildren(...seen.map(row => {
    const open = make("button", "entry", make("span", "name", oneLine(row.title, 80)), make("span", "small", dayOf(row.changed)));
    open.type = "button";
    open.dataset.id = row.id;
    if (row.id === talk.id) open.setAttribute("aria-current", "true");
    open.addEventListener("click", () => openConversation(row.id));
    return make("li", "", open);
  }));
  if (focused) rowOf(focused)?.focus();
  $("find-row").hidden = rows.length < 8 && !wanted;
  $("export-all").disabled = $("delete-all").disabled = !rows.length;
}

const rowOf = id => [...$("conversations").querySelectorAll("button")].find(each => each.dataset.id === id);

function dayOf(time) {
  const day = new Date(time), today = new Date().toDateString() === day.toDateString();
  return day.toLocaleString([], today ? { hour: "2-digit", minute: "2-digit" } : { day: "numeric", month: "short" });
}

async function openConversation(id, focus = true) {
  const row = rows.find(each => each.id === id);
  if (!row) return;
  const messages = new Map((await store.messages(id)).map(each => [each.id, each]));
  const leaf = messages.has(row.leaf) ? row.leaf : newestBelow(messages, null);
  select("chat");
  show(running && running.talk?.id === id ? running.talk : { id, row, messages, leaf, system: row.system || "" });
  listConversations();
  closePanel("list");
  if (focus) $("message").focus();
}

function fresh() {
  select("chat");
  if (talk.row) show(newTalk());
  $("status").textContent = "";
  listConversations();
  closePanel("list");
  $("message").focus();
}
$("fresh").addEventListener("click", fresh);
$("find").addEventListener("input", listConversations);

$("conversations").addEventListener("keydown", event => {
  const { id } = event.target.dataset, all = [...$("conversations").querySelectorAll("button")], at = all.indexOf(event.target);
  if (event.altKey || event.ctrlKey || event.metaKey || at < 0) return;
  const to = { ArrowDown: at + 1, ArrowUp: at - 1, Home: 0, End: all.length - 1 }[event.key];
  if (to !== undefined) all[Math.max(0, Math.min(to, all.length - 1))].focus();
  else if (event.key === "Delete") discard([id]);
  else if (event.key === "F2") openConversation(id, false).then(rename);
  else return;
  event.preventDefault();
});

// ---- Renaming ----------------------------------------------------------------------------------------------------

function rename() {
  if (!talk.row || $("title-row").querySelector("input")) return;
  const renamed = talk, field = make("input");
  let open = true;
  const ends = taken => {
    if (!open) return; // removing the field takes its focus
    open = false;
    const title = field.value.trim();
    field.remove();
    $("title").hidden = false;
    if (taken && title && title !== renamed.row.title) {
      renamed.row.title = title;
      store.save(renamed.id, { title }, [], whole(renamed)).then(listConversations);
    }
    render();
  };
  field.value = talk.row.title;
  field.maxLength = 200;
  field.setAttribute("aria-label", "Title of the conversation");
  $("title").hidden = true;
  $("title").after(field);
  field.addEventListener("keydown", event => {
    if (event.key !== "Enter" && event.key !== "Escape" || event.isComposing) return;
    event.preventDefault();
    event.stopPropagation();
    ends(event.key === "Enter");
    $("rename").focus();
  });
  field.addEventListener("blur", () => ends(true));
  field.focus();
  field.select();
}
$("rename").addEventListener("click", rename);

// ---- Deleting ----------------------------------------------------------------------------------------------------

async function discard(ids) {
  if (running && running.talk && ids.includes(running.talk.id)) {
    running.talk.deleted = true; // its answer is not kept
    running.abort();
  }
  const title = ids.length === 1 ? `“${oneLine(rows.find(row => row.id === ids[0]).title, 30)}”` : counted(ids.length, "conversation");
  removed = await store.remove(ids);
  if (ids.includes(talk.id)) show(newTalk());
  const undo = button("Undo", async () => {
    $("undo").replaceChildren();
    const back = removed;
    removed = [];
    await store.restore(back);
    await listConversations();
    if (back.length === 1) openConversation(back[0].row.id);
  });
  $("undo").replaceChildren(make("span", "", `Deleted ${title}. `), undo);
  await listConversations();
  if (matchMedia(WITH_LIST).matches || $("list").hasAttribute("data-open")) undo.focus();
  else openPanel("list", undo);
}
$("delete").addEventListener("click", () => discard([talk.id]));
$("delete-all").addEventListener("click", () => discard(rows.map(row => row.id)));

// ---- Files -------------------------------------------------------------------------------------------------------

$("export-markdown").addEventListener("click", () =>
  download(fileName(talk.row.title, "md"), asMarkdown(talk.row, pathTo(talk.messages, talk.leaf)), "text/markdown"));
$("export-json").addEventListener("click", () =>
  download(fileName(talk.row.title, "json"), asJson([{ row: talk.row, messages: [...talk.messages.values()] }]), "application/json"));
$("export-all").addEventListener("click", async () => {
  const all = [];
  for (const row of rows) all.push({ row, messages: await store.messages(row.id) });
  download("rest-local-conversations.json", asJson(all), "application/json");
});

$("import").addEventListener("click", () => $("import-file").click());
$("import-file").addEventListener("change", async () => {
  const files = [...$("import-file").files];
  $("import-file").value = "";
  say(null);
  let came = [];
  try {
    for (const file of files) {
      if (file.size > MOST_IMPORTED) throw new Problem(`${oneLine(file.name, 100)} cannot be imported: it is larger than ${sizeText(MOST_IMPORTED)}.`);
      came = [...came, ...fromJson(await file.text(), oneLine(file.name, 100))];
    }
  } catch (problem) {
    say(problem);
    return; // all of them or none
  }
  await store.restore(came);
  await listConversations();
  $("undo").replaceChildren(`Imported ${counted(came.length, "conversation")}.`);
  if (came.length === 1) openConversation(came[0].row.id);
});
