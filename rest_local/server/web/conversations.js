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

let listings = 0; // counts, because a search may end after the next one

async function listConversations() {
  const wanted = $("find").value.trim().toLowerCase(), turn = listings += 1;
  const found = wanted ? await store.search(wanted) : new Map();
  const all = await store.list();
  if (turn !== listings) return;
  rows = all;
  const focused = document.activeElement.dataset.id;
  const seen = rows.filter(row => found.has(row.id) || row.title.toLowerCase().includes(wanted));
  $("conversations").replaceChildren(...seen.map(row => {
    const open = make("button", "entry", make("span", "name", oneLine(row.title, 80)), make("span", "small", dayOf(row.changed)));
    const message = found.get(row.id);
    if (message) open.append(make("span", "small excerpt", excerpt(textOf(message), wanted)));
    open.type = "button";
    open.dataset.id = row.id;
    open.addEventListener("click", () => openConversation(row.id, !message, message));
    return make("li", "", open);
  }));
  markOpen();
  if (focused) rowOf(focused)?.focus();
  $("find-row").hidden = !rows.length && !wanted;
  $("export-all").disabled = $("delete-all").disabled = !rows.length;
}

/** Marks the open conversation. At once, because the list itself is read from the store, and keys may come before that. */
function markOpen() {
  for (const row of $("conversations").querySelectorAll("button")) {
    if (row.dataset.id === talk.id) row.setAttribute("aria-current", "true");
    else row.removeAttribute("aria-current");
  }
}

/** The text around what was searched for. */
function excerpt(text, wanted) {
  const at = text.toLowerCase().indexOf(wanted), near = Math.max(0, at - 15), gap = text.slice(near, at).search(/\s/);
  const from = !near ? 0 : gap < 0 ? at : near + gap + 1;
  return (from ? "…" : "") + oneLine(text.slice(from, at + wanted.length + 60), 70);
}

/** Marks on the page what was searched for, and goes to its first place in a message. */
function showFound(message, wanted) {
  const { answer, asked, element } = views.get(message.id), shownText = answer ? answer.text : asked;
  const text = shownText.textContent.toLowerCase(), places = [];
  for (let at = -1; (at = text.indexOf(wanted, at + 1)) >= 0;) places.push([at, at + wanted.length, "found"]);
  const ranges = paints ? rangesOf([shownText], places) : [];
  for (const [paint, range] of ranges) painted[paint].add(range);
  ((ranges[0] && ranges[0][1].startContainer.parentElement) || element).scrollIntoView({ block: "center" });
}

const rowOf = id => [...$("conversations").querySelectorAll("button")].find(each => each.dataset.id === id);

function dayOf(time) {
  const day = new Date(time), today = new Date().toDateString() === day.toDateString();
  return day.toLocaleString([], today ? { hour: "2-digit", minute: "2-digit" } : { day: "numeric", month: "short" });
}

/** `found`: a message of it that is to be shown. */
async function openConversation(id, focus = true, found = null) {
  const row = rows.find(each => each.id === id);
  if (!row) return;
  const messages = new Map((await store.messages(id)).map(each => [each.id, each]));
  const kept = messages.has(row.leaf) ? row.leaf : newestBelow(messages, null);
  const shows = !found || pathTo(messages, kept).some(each => each.id === found.id);
  const leaf = shows ? kept : newestBelow(messages, found.id);
  select("chat");
  show(running && running.talk?.id === id ? running.talk : { id, row, messages, leaf, system: row.system || "" });
  listConversations();
  closePanel("list");
  if (focus) $("message").focus();
  if (found && views.has(found.id)) showFound(found, $("find").value.trim().toLowerCase());
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
