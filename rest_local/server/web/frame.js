// The frame of the page: tabs, the panels of narrow windows, plain text.

import { $, stored, within } from "./dom.js";
import { repaint } from "./figures.js";

const MODES = ["chat", "complete", "infill"];

/** Show one of the tabs.
    @param {string} mode */
export function select(mode, focus = false) {
  for (const each of MODES) {
    const tab = $(`tab-${each}`), chosen = each === mode;
    tab.setAttribute("aria-selected", String(chosen));
    tab.tabIndex = chosen ? 0 : -1;
    $(each).hidden = !chosen;
    if (chosen && focus) tab.focus();
  }
  $("hint").textContent = mode === "chat"
    ? "Enter sends, Shift+Enter starts a new line, Escape stops the answer." : "Ctrl+Enter sends, Escape stops the answer.";
}

MODES.forEach((mode, place) => {
  $(`tab-${mode}`).addEventListener("click", () => select(mode));
  $(`tab-${mode}`).addEventListener("keydown", event => {
    /** @type {Record<string, number>} */
    const moves = { ArrowRight: place + 1, ArrowLeft: place - 1, Home: 0, End: -1 };
    const to = MODES.at(moves[event.key] % MODES.length);
    if (!Object.hasOwn(moves, event.key) || !to) return;
    event.preventDefault();
    select(to, true);
  });
});

/** Focus the text field of the tab that is shown. */
export const focusText = () => within(document, "[role=tabpanel]:not([hidden]) form textarea").focus();
within(document, ".skip").addEventListener("click", event => {
  event.preventDefault();
  focusText();
});
$("to-complete").addEventListener("click", () => select("complete", true));

// ---- Panels: the list and the settings lie over the page where it is narrow ----------------------------------------

export const WITH_LIST = "(min-width: 75rem)", WITH_SIDE = "(min-width: 60rem)"; // as in the style sheet
/** The width from which each panel stands beside the text.
    @type {Record<string, string>} */
const PANELS = { list: WITH_LIST, side: WITH_SIDE };

/** @param {string} name @param {HTMLElement} [focus] */
export function openPanel(name, focus) {
  if (matchMedia(PANELS[name]).matches) {
    if (name === "side") foldSide(false);
    return;
  }
  for (const other of Object.keys(PANELS)) if (other !== name) closePanel(other);
  $(name).setAttribute("data-open", "");
  $(`open-${name}`).setAttribute("aria-expanded", "true");
  (focus || within($(name), "button, summary, input")).focus();
  repaint();
}

/** @param {string} name */
export function closePanel(name, focus = false) {
  if (!$(name).hasAttribute("data-open")) return false;
  $(name).removeAttribute("data-open");
  $(`open-${name}`).setAttribute("aria-expanded", "false");
  if (focus) $(`open-${name}`).focus();
  return true;
}

const isFolded = () => document.documentElement.hasAttribute("data-folded");

/** Show the settings and statistics of a wide page beside the text, or hide them.
    @param {boolean} folded */
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

for (const part of /** @type {HTMLDetailsElement[]} */ ([$("statistics"), $("settings")])) {
  part.open = stored("localStorage", `rest-local-${part.id}`) !== "folded";
  part.addEventListener("toggle", () => {
    stored("localStorage", `rest-local-${part.id}`, part.open ? "open" : "folded");
    repaint();
  });
}

/** Move the buttons of the view into the panel where the header is too narrow for them. */
function placeView() {
  const wide = matchMedia(WITH_SIDE).matches;
  if (wide) $("open-side").before($("view"));
  else $("side").prepend($("view"));
  $("open-side").setAttribute("aria-expanded", String(wide ? !isFolded() : $("side").hasAttribute("data-open")));
}
matchMedia(WITH_SIDE).addEventListener("change", placeView);
foldSide(stored("localStorage", "rest-local-side") === "folded");

document.addEventListener("pointerdown", event => {
  for (const name of Object.keys(PANELS)) {
    if (event.target instanceof Element && !event.target.closest(`#${name}, #open-${name}, #tip`)) closePanel(name);
  }
});

// ---- Plain text --------------------------------------------------------------------------------------------------

/** @param {boolean} plain */
function setPlain(plain) {
  document.documentElement.toggleAttribute("data-plain", plain);
  $("plain").setAttribute("aria-pressed", String(plain));
}
$("plain").addEventListener("click", () => {
  const plain = !document.documentElement.hasAttribute("data-plain");
  setPlain(plain);
  stored("localStorage", "rest-local-plain", plain ? "yes" : "no");
});

setPlain(stored("localStorage", "rest-local-plain") === "yes");
