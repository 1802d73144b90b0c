// The entry of the page: settings, forms, keyboard, and the start.

import { $, field, make, stored, within } from "./dom.js";
import { store } from "./store.js";
import { state } from "./state.js";
import { point } from "./tokens.js";
import { closePanel, focusText, openPanel, select } from "./frame.js";
import { connect } from "./server.js";
import { once } from "./complete.js";
import { ask, editNewest, focusAnswer, regenerate } from "./chat.js";
import { followStore, fresh, openConversation } from "./conversations.js";

// ---- Settings ----------------------------------------------------------------------------------------------------

const KEPT = ["temperature", "max-tokens", "seed", "top-p", "top-k", "min-p", "repeat-penalty", "policy"];
const OF_TAB = ["prediction", "key"]; // kept until the tab is closed
for (const name of [...KEPT, ...OF_TAB]) {
  const kind = KEPT.includes(name) ? "localStorage" : "sessionStorage";
  const value = stored(kind, `rest-local-${name}`);
  if (value !== null) field(name).value = value;
  $(name).addEventListener("change", () => {
    stored(kind, `rest-local-${name}`, field(name).value);
    if (name === "key") connect();
  });
}
$("system").addEventListener("input", () => { state.talk.row.system = field("system").value });
$("system").addEventListener("change", () => { if (state.talk.messages.length) store.save(state.talk, []) });
$("options").addEventListener("submit", event => event.preventDefault());

// ---- Forms -------------------------------------------------------------------------------------------------------

/** The texts of the fields of each tab.
    @type {Record<string, Record<string, string>>} */
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

for (const mode of Object.keys(EXAMPLES)) {
  const form = /** @type {HTMLFormElement} */ (within($(mode), "form")), start = () => mode === "chat" ? ask() : once(mode);
  form.addEventListener("submit", event => {
    event.preventDefault();
    if (document.activeElement?.classList.contains("send")) focusText();
    start();
  });
  form.addEventListener("keydown", event => {
    // A phone's keyboard has no key for a new line but Enter.
    const sends = mode === "chat" ? !event.shiftKey && !matchMedia("(pointer: coarse)").matches : event.ctrlKey || event.metaKey;
    if (event.key !== "Enter" || !sends || event.isComposing || !(event.target instanceof HTMLTextAreaElement)) return;
    event.preventDefault();
    start();
  });
  within($(mode), "[data-example]").addEventListener("click", () => {
    for (const [id, text] of Object.entries(EXAMPLES[mode])) field(id).value = text;
    focusText();
  });
}
$("stop").addEventListener("click", () => state.running?.abort());

// ---- Keyboard ----------------------------------------------------------------------------------------------------

const shortcuts = /** @type {HTMLDialogElement} */ ($("shortcuts"));
/** The keys with Alt and Shift: the code of each, its name, what it does.
    @type {Record<string, [name: string, what: string, act: () => void]>} */
const SHORTCUTS = {
  KeyN: ["N", "Begin a new conversation", fresh],
  KeyL: ["L", "Go to the list of conversations", () => {
    openPanel("list");
    within($("list"), $("conversations").querySelector("[aria-current]") ? "[aria-current]" : "#conversations button, #fresh").focus();
  }],
  KeyM: ["M", "Write a message", () => { select("chat"); $("message").focus() }],
  KeyE: ["E", "Edit the newest message", editNewest],
  KeyR: ["R", "Regenerate the newest answer", regenerate],
  KeyA: ["A", "Go to the newest answer", focusAnswer],
  KeyS: ["S", "Go to the settings", () => { openPanel("side"); $("settings").setAttribute("open", ""); $("system").focus() }],
  KeyK: ["K", "Show this list", () => shortcuts.showModal()],
};
const MORE_KEYS = [
  ["Enter", "Send the message. Shift+Enter starts a new line."],
  ["Ctrl+Enter", "Complete the text, or fill the gap."],
  ["Escape", "Stop the answer, or close what is open."],
  ["← → ↑ ↓", "Go from token to token and from step to step in an answer, and from row to row in the list."],
  ["F2, Delete", "Rename or delete a conversation in the list."],
];
for (const [keys, what] of [...MORE_KEYS, ...Object.values(SHORTCUTS).map(([key, what]) => [`Alt+Shift+${key}`, `${what}.`])]) {
  within(shortcuts, "dl").append(make("dt", "", make("kbd", "", keys)), make("dd", "", what));
}
$("help").addEventListener("click", () => shortcuts.showModal());
$("close-shortcuts").addEventListener("click", () => shortcuts.close());

document.addEventListener("keydown", event => {
  if (event.key === "Escape" && !shortcuts.open) {
    if (closePanel("list", true) || closePanel("side", true)) return;
    if (state.running) state.running.abort();
    else point(null);
  }
  const shortcut = event.altKey && event.shiftKey && !event.ctrlKey && !event.metaKey && SHORTCUTS[event.code];
  if (!shortcut || shortcuts.open) return;
  event.preventDefault();
  shortcut[2]();
});

// ---- The start ---------------------------------------------------------------------------------------------------

select("chat");
connect();
$("message").focus();
followStore();
openConversation(stored("sessionStorage", "rest-local-open") || "");
