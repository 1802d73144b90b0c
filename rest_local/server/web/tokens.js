"use strict";
// One token: by pointer, by focus, by arrow keys.

let pointed = null; // the token of the tooltip

function mark(place) {
  for (const each of document.querySelectorAll(".text .step")) each.classList.remove("step");
  marked = place;
  if (place) {
    for (const { elements } of place.answer.steps[place.step]) for (const each of elements) each.classList.add("step");
  }
  repaint();
}

function describe(element) {
  const { answer, step, token, source } = told.get(element), [name, why] = LEGEND[source];
  const rows = make("dl"), together = answer.steps[step].length;
  const row = (term, value) => rows.append(make("dt", "", term), make("dd", "", value));
  const parts = [make("div", "", make("strong", `swatch ${source}`, name), ` ${why}`)];
  if (token.file) parts.push(make("div", "place", `${printable(token.file)}:${token.line}`));
  if (token.match) row("match", `${token.match} ${token.match === 1 ? "token" : "tokens"} before it agreed`);
  if (token.probability !== null) row("probability", `${number(token.probability, 2)} estimated for the path to it`);
  row("step", `${step + 1} of ${answer.steps.length}, ${together} ${together === 1 ? "token" : "tokens at once"}`);
  if (token.source.endsWith("~")) row("verified", "relaxed: the model itself would have said another");
  parts.push(rows);
  return parts;
}

function point(element) {
  if (pointed) pointed.removeAttribute("aria-describedby");
  pointed = element;
  $("tip").hidden = !element;
  if (!element) return mark(null);
  $("tip").replaceChildren(...describe(element));
  element.setAttribute("aria-describedby", "tip");
  mark(told.get(element));
  placeTip();
}

function placeTip() {
  if (!pointed) return;
  const at = pointed.getClientRects()[0] || pointed.getBoundingClientRect(), tip = $("tip").getBoundingClientRect();
  const below = at.bottom + 8 + tip.height < innerHeight;
  $("tip").style.left = `${Math.max(8, Math.min(at.left, innerWidth - tip.width - 8))}px`;
  $("tip").style.top = `${below ? at.bottom + 8 : Math.max(8, at.top - tip.height - 8)}px`;
}

const tokenAt = target => target instanceof Element && target.closest("[tabindex]");

document.addEventListener("pointermove", event => { // not pointerover, which scrolling text fires too
  const under = tokenAt(event.target), focused = told.has(document.activeElement) ? document.activeElement : null;
  const wanted = told.has(under) ? under : focused;
  if (wanted !== pointed) point(wanted);
});
document.addEventListener("focusin", event => point(told.has(event.target) ? event.target : null));
document.addEventListener("focusout", event => { if (event.target === pointed) point(null) });
document.addEventListener("scroll", placeTip, true);

document.addEventListener("keydown", event => {
  const from = told.get(event.target);
  if (!from || event.ctrlKey || event.altKey || event.metaKey) return;
  const words = from.answer.words(), at = words.indexOf(from), last = words.length - 1;
  const ofStep = step => words.findIndex(word => word.step >= step);
  const before = words.findLast(word => word.step < from.step);
  const to = {
    ArrowRight: () => Math.min(at + 1, last), ArrowLeft: () => Math.max(at - 1, 0), Home: () => 0, End: () => last,
    ArrowDown: () => ofStep(from.step + 1), ArrowUp: () => ofStep(before ? before.step : 0),
  }[event.key];
  if (!to) return;
  event.preventDefault();
  const next = words[to()] || words[last];
  from.answer.moveStop(next);
  seen(next).focus();
});
