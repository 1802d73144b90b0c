// One token: by pointer, by focus, by arrow keys.

import { $, counted, make, number, printable } from "./dom.js";
import { seen, told } from "./markdown.js";
import { LEGEND } from "./answer.js";
import { mark } from "./figures.js";

/** @import { Word } from "./types.js" */

/** The token of the tooltip.
    @type {Element | null} */
let pointed = null;

/** Say where a token came from.
    @param {Word} word */
function describe({ answer, step, token, source }) {
  const [name, why] = LEGEND[source], others = answer.steps[step].length - 1;
  const parts = [make("div", "", make("strong", `swatch ${source}`, name), ` ${why}`)];
  const say = (/** @type {string} */ text) => parts.push(make("div", "", text));
  if (token.file) parts.push(make("div", "place", `${printable(token.file)}:${token.line}`));
  if (token.match === 1) say("The token before it is the same there.");
  else if (token.match) say(`The ${number(token.match)} tokens before it are the same there.`);
  if (typeof token.probability === "number") say(`It was expected to be right with a probability of ${number(token.probability, 2)}.`);
  say(`Step ${number(step + 1)} of ${number(answer.steps.length)} wrote it${others ? ` together with ${counted(others, "other token")}` : ""}.`);
  if (token.source.endsWith("~")) say("The model itself would have written another token: verification is relaxed.");
  return parts;
}

/** Show the tooltip of a token, or hide it.
    @param {Element | null} element */
export function point(element) {
  pointed?.removeAttribute("aria-describedby");
  pointed = element;
  const word = element && told.get(element);
  $("tip").hidden = !word;
  if (!word) return mark(null);
  $("tip").replaceChildren(...describe(word));
  element.setAttribute("aria-describedby", "tip");
  mark(word);
  placeTip();
}

/** Forget the token of the tooltip if a change of its line has removed it. */
export function forgetRemoved() {
  if (pointed && !pointed.isConnected) point(null);
}

function placeTip() {
  if (!pointed) return;
  const at = pointed.getClientRects()[0] || pointed.getBoundingClientRect(), tip = $("tip").getBoundingClientRect();
  const below = at.bottom + 8 + tip.height < innerHeight;
  $("tip").style.left = `${Math.max(8, Math.min(at.left, innerWidth - tip.width - 8))}px`;
  $("tip").style.top = `${below ? at.bottom + 8 : Math.max(8, at.top - tip.height - 8)}px`;
}

/** Return the token at or around an element, if there is one.
    @param {EventTarget | null} target */
function tokenAt(target) {
  const element = target instanceof Element ? target.closest("[tabindex]") : null;
  return element && told.has(element) ? element : null;
}

document.addEventListener("pointermove", event => { // not pointerover, which scrolling text fires too
  const wanted = tokenAt(event.target) || tokenAt(document.activeElement);
  if (wanted !== pointed) point(wanted);
});
document.addEventListener("focusin", event => point(tokenAt(event.target)));
document.addEventListener("focusout", event => { if (event.target === pointed) point(null) });
document.addEventListener("scroll", placeTip, true);

document.addEventListener("keydown", event => {
  const element = tokenAt(event.target), from = element && told.get(element);
  if (!from || event.ctrlKey || event.altKey || event.metaKey) return;
  const words = from.answer.words(), at = words.indexOf(from), last = words.length - 1;
  const ofStep = (/** @type {number} */ step) => words.findIndex(word => word.step >= step);
  const before = words.findLast(word => word.step < from.step);
  /** @type {Record<string, () => number>} */
  const moves = {
    ArrowRight: () => Math.min(at + 1, last), ArrowLeft: () => Math.max(at - 1, 0), Home: () => 0, End: () => last,
    ArrowDown: () => ofStep(from.step + 1), ArrowUp: () => ofStep(before ? before.step : 0),
  };
  if (!Object.hasOwn(moves, event.key)) return;
  event.preventDefault();
  const next = words[moves[event.key]()] || words[last];
  from.answer.moveStop(next);
  seen(next)?.focus();
});
