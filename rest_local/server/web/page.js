"use strict";
// The frame: tabs, panels of narrow windows, theme, settings, keyboard; and the start.

const tabs = [...document.querySelectorAll("[role=tab]")];

function select(mode, focus = false) {
  for (const tab of tabs) {
    const chosen = tab.id === `tab-${mode}`;
    tab.setAttribute("aria-selected", chosen);
    tab.tabIndex = chosen ? 0 : -1;
    $(tab.getAttribute("aria-controls")).hidden = !chosen;
    if (chosen && focus) tab.focus();
  }
  $("hint").textContent = mode === "chat" ? "Enter sends, Shift+Enter breaks the line, Escape stops" : "Ctrl+Enter sends, Escape stops";
}

tabs.forEach((tab, place) => {
  const mode = tab.getAttribute("aria-controls");
  tab.addEventListener("click", () => select(mode));
  tab.addEventListener("keydown", event => {
    const to = { ArrowRight: place + 1, ArrowLeft: place - 1, Home: 0, End: tabs.length - 1 }[event.key];
    if (to === undefined) return;
    event.preventDefault();
    select(tabs.at(to % tabs.length).getAttribute("aria-controls"), true);
  });
});
document.querySelector(".skip").addEventListener("click", event => {
  event.preventDefault();
  document.querySelector("[role=tabpanel]:not([hidden]) form textarea").focus();
});
$("to-complete").addEventListener("click", () => select("complete", true));
$("notice").lastElementChild.addEventListener("click", () => say(null));

// ---- Panels: the list and the settings lie over the page where it is narrow ----------------------------------------

const WITH_LIST = "(min-width: 75rem)", WITH_SIDE = "(min-width: 60rem)"; // as in the style sheet
const PANELS = { list: WITH_LIST, side: WITH_SIDE };

function openPanel(name, focus = null) {
  if (matchMedia(PANELS[name]).matches) {
    if (name === "side") foldSide(false);
    return;
  }
  for (const other of Object.keys(PANELS)) if (other !== name) closePanel(other);
  $(name).setAttribute("data-open", "");
  $(`open-${name}`).setAttribute("aria-expanded", "true");
  (focus || $(name).querySelector("button, summary, input")).focus();
  repaint();
}

function closePanel(name, focus = false) {
  if (!$(name).hasAttribute("data-open")) return false;
  $(name).removeAttribute("data-open");
  $(`open-${name}`).setAttribute("aria-expanded", "false");
  if (focus) $(`open-${name}`).focus();
  return true;
}

const isFolded = () => document.documentElement.hasAttribute("data-folded");

/** The settings and statistics of a wide page: beside the text, or away. */
function foldSide(folded) {
  document.documentElement.toggleAttribute("data-folded", folded);
  stored("localStorage", "rest-local-side", folded ? "folded" : "open");
  placeView();
  repaint();
}

$("open-list").addEventListener("click", () => closePanel("list", true) || openPanel("list"));
$("open-side").addEventListener("click", () => {
  if (matchMedia(WITH_SIDE).matches) foldSide(!isFolded());
  else if (!closePanel("side", true)) openPanel("side");
});

for (const part of [$("statistics"), $("settings")]) {
  part.open = stored("localStorage", `rest-local-${part.id}`) !== "folded";
  part.addEventListener("toggle", () => {
    stored("localStorage", `rest-local-${part.id}`, part.open ? "open" : "folded");
    repaint();
  });
}

/** A narrow header has no room for the buttons of the view. */
function placeView() {
  const wide = matchMedia(WITH_SIDE).matches;
  if (wide) $("open-side").before($("view"));
  else $("side").prepend($("view"));
  $("open-side").setAttribute("aria-expanded", wide ? !isFolded() : $("side").hasAttribute("data-open"));
}
matchMedia(WITH_SIDE).addEventListener("change", placeView);
foldSide(stored("localStorage", "rest-local-side") === "folded");

document.addEventListener("pointerdown", event => {
  for (const name of Object.keys(PANELS)) {
    if (!event.target.closest(`#${name}, #open-${name}, #tip`)) closePanel(name);
  }
});

// ---- Theme -------------------------------------------------------------------------------------------------------

const THEMES = { automatic: "", light: "light", dark: "dark" };
function setTheme(name) {
  document.documentElement.dataset.theme = THEMES[name];
  $("theme").textContent = `Colours: ${name}`;
  repaint();
}
$("theme").addEventListener("click", () => {
  const names = Object.keys(THEMES), now = names.findIndex(name => THEMES[name] === document.documentElement.dataset.theme);
  const next = names[(now + 1) % names.length];
  setTheme(next);
  stored("localStorage", "rest-local-theme", next);
});

function setPlain(plain) {
  document.documentElement.toggleAttribute("data-plain", plain);
  $("plain").setAttribute("aria-pressed", plain);
}
$("plain").addEventListener("click", () => {
  const plain = !document.documentElement.hasAttribute("data-plain");
  setPlain(plain);
  stored("localStorage", "rest-local-plain", plain ? "yes" : "no");
});

// ---- Settings ----------------------------------------------------------------------------------------------------

const KEPT = ["temperature", "max-tokens", "seed", "top-p", "top-k", "min-p", "repeat-penalty", "policy"];
const OF_TAB = ["prediction", "key"]; // kept until the tab is closed
for (const name of [...KEPT, ...OF_TAB]) {
  const kind = KEPT.includes(name) ? "localStorage" : "sessionStorage";
  const value = stored(kind, `rest-local-${name}`);
  if (value !== null) $(name).value = value;
  $(name).addEventListener("change", () => {
    stored(kind, `rest-local-${name}`, $(name).value);
    if (name === "key") connect();
  });
}
$("system").addEventListener("input", () => { talk.row.system = $("system").value });
$("system").addEventListener("change", () => { if (talk.messages.length) store.save(talk, []) });
$("options").addEventListener("submit", event => event.preventDefault());

// ---- Keyboard ----------------------------------------------------------------------------------------------------

/** The newest message of one role on the page. */
const newest = role => talk.messages.findLast(each => each.role === role);

function neighbour(by) {
  const at = rows.findIndex(row => row.id === talk.row.id), to = at < 0 ? (by > 0 ? 0 : -1) : at + by;
  if (rows[to]) openConversation(rows[to].id);
}

const SHORTCUTS = { // with Alt and Shift: the code of a key -> its name, what it does
  KeyN: ["N", "New conversation", fresh],
  KeyL: ["L", "Go to the list of conversations", () => {
    openPanel("list");
    ($("conversations").querySelector("[aria-current]") || $("conversations").querySelector("button") || $("fresh")).focus();
  }],
  ArrowDown: ["↓", "Older conversation", () => neighbour(1)],
  ArrowUp: ["↑", "Newer conversation", () => neighbour(-1)],
  KeyM: ["M", "Write a message", () => { select("chat"); $("message").focus() }],
  KeyE: ["E", "Edit the newest message", () => { const message = newest("user"); if (message && !running) edit(message) }],
  KeyR: ["R", "Regenerate the newest answer", regenerate],
  KeyA: ["A", "Go to the newest answer", () => { const message = newest("assistant"); if (message) views.get(message.id).answer.text.querySelector("[tabindex='0']")?.focus() }],
  KeyS: ["S", "Go to the settings", () => { openPanel("side"); $("settings").open = true; $("system").focus() }],
  KeyK: ["K", "This list", () => $("shortcuts").showModal()],
};
const MORE_KEYS = [
  ["Enter", "Send the message; Shift+Enter breaks the line"],
  ["Ctrl+Enter", "Complete the text, fill the gap"],
  ["Escape", "Stop the answer, or close what is open"],
  ["← → ↑ ↓", "In an answer: from token to token, from step to step. In the list: from row to row"],
  ["F2, Delete", "In the list: rename, delete a conversation"],
];
for (const [keys, what] of [...MORE_KEYS, ...Object.values(SHORTCUTS).map(([key, what]) => [`Alt+Shift+${key}`, what])]) {
  $("shortcuts").querySelector("dl").append(make("dt", "", make("kbd", "", keys)), make("dd", "", what));
}
$("help").addEventListener("click", () => $("shortcuts").showModal());
$("close-shortcuts").addEventListener("click", () => $("shortcuts").close());

document.addEventListener("keydown", event => {
  if (event.key === "Escape" && !$("shortcuts").open) {
    if (closePanel("list", true) || closePanel("side", true)) return;
    if (running) running.abort();
    else point(null);
  }
  const shortcut = event.altKey && event.shiftKey && !event.ctrlKey && !event.metaKey && SHORTCUTS[event.code];
  if (!shortcut || $("shortcuts").open) return;
  event.preventDefault();
  shortcut[2]();
});

// ---- The start ---------------------------------------------------------------------------------------------------

const theme = stored("localStorage", "rest-local-theme");
setTheme(theme in THEMES ? theme : "automatic");
setPlain(stored("localStorage", "rest-local-plain") === "yes");
select("chat");
connect();
$("message").focus();
followStore();
openConversation(stored("sessionStorage", "rest-local-open"));
