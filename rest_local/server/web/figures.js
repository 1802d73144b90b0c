// The figures of an answer, in numbers, in words and as a chart; where its tokens came from.

import { $, counted, make, number, printable, speedText } from "./dom.js";
import { state } from "./state.js";
import { LEGEND } from "./answer.js";

/** @import { Answer } from "./answer.js" */
/** @import { Place, Source, Word } from "./types.js" */

const SOURCES = /** @type {Source[]} */ (Object.keys(LEGEND));
const RARE = ["drafter", "grammar", "edit"]; // shown when there is one
const MOST_FILES = 6; // files that are named
const chart = /** @type {HTMLCanvasElement} */ ($("chart"));
let painting = false;

const legend = SOURCES.map(source => {
  const [name, why] = LEGEND[source], percent = make("b"), part = make("i", source);
  const row = make("li", "", make("span", `swatch ${source}`, name), make("span", "why", why), percent);
  row.hidden = RARE.includes(source);
  $("legend").append(row);
  $("share").append(part);
  return { source, row, percent, part };
});

/** Mark a step in its answer and in the chart.
    @param {Place | null} place */
export function mark(place) {
  for (const each of document.querySelectorAll(".text .step")) each.classList.remove("step");
  state.marked = place;
  if (place) {
    for (const { elements } of place.answer.steps[place.step]) for (const each of elements) each.classList.add("step");
  }
  repaint();
}

/** Bring the figures up to date with the next frame. */
export function repaint() {
  if (painting) return;
  painting = true;
  requestAnimationFrame(() => { painting = false; paint(); follow() });
}

function paint() {
  const { shown } = state, steps = shown ? shown.steps : [], against = shown?.tokens ? againstPlain(shown) : 0;
  $("speed").textContent = shown?.speed ? speedText(shown.speed) : "–";
  $("mat").textContent = shown && steps.length ? number(shown.mat, 2) : "–";
  $("drafted").textContent = shown && steps.length ? `${number(100 * shown.drafted)} %` : "–";
  $("factor").textContent = against ? `${number(against, 1)} ×` : "–";
  $("words").textContent = inWords(shown, against);
  const live = state.running && steps.length;
  $("live").textContent = live ? `${$("speed").textContent} tokens/s${against ? `, ${number(against, 1)} × plain` : ""}` : "";
  $("withheld").hidden = !(shown?.withheld && !steps.length);
  chart.hidden = !$("withheld").hidden;
  for (const { source, row, percent, part } of legend) {
    const share = shown && steps.length ? shown.counts[source] / shown.tokens : 0;
    percent.textContent = share ? share < .005 ? "< 1 %" : `${number(100 * share)} %` : "";
    row.hidden = RARE.includes(source) && !share;
    part.style.width = `${100 * share}%`;
  }
  listFiles(shown);
  if (!chart.hidden) drawChart(shown);
}

/** Return the end of a long path, where the name of the file is.
    @param {string} path */
const endOf = path => path.length > 32 ? `…${path.slice(-31)}` : path;

/** List the files that most of the drafted tokens were found in.
    @param {Answer | null} shown */
function listFiles(shown) {
  const files = [...shown?.files || []].sort((one, other) => other[1] - one[1]), rest = files.length - MOST_FILES;
  const rows = files.slice(0, MOST_FILES).map(([file, tokens]) =>
    make("li", "", make("span", "place", endOf(printable(file))), make("b", "", counted(tokens, "token"))));
  if (rest > 0) rows.push(make("li", "hint", `and ${counted(rest, "more file")}`));
  $("files").replaceChildren(...rows);
  $("found").hidden = !files.length;
}

// ---- Against plain decoding --------------------------------------------------------------------------------------

/** How many milliseconds a plain step of each model takes, as the server said last. The next answer is compared with it
    while it is written.
    @type {Map<string, number>} */
const plainSteps = new Map();

/** @param {Answer} answer */
export function learnPlain({ draft, request }) {
  if (draft?.plain_step_ms) plainSteps.set(request.model, draft.plain_step_ms);
}

/** Return how many times as fast as plain decoding an answer is, or 0 if that is not known.
    @param {Answer} answer */
function againstPlain(answer) {
  const { draft, plainMs, request, timings } = answer;
  if (!answer.drafts) return 1;
  if (timings && !timings.draft_n && !plainMs) return 0; // lookups cost less than can be told from one answer
  const ms = plainMs || (draft ? draft.plain_step_ms : plainSteps.get(request.model));
  return ms ? answer.speed * ms / 1000 : 0;
}

/** Say the figures for readers who do not know the terms.
    @param {Answer | null} answer @param {number} against */
function inWords(answer, against) {
  if (!answer || !answer.tokens) return "The speed of the next answer is shown here while it is written.";
  if (!answer.drafts) return "Plain decoding: each token took a step of its own.";
  const now = state.running?.answer === answer, gave = now ? "gives" : "gave";
  const each = `On average, a step of the model ${gave} ${number(answer.mat, 1)} tokens. Without drafting it gives 1.`;
  let speed = "“Run again without drafting”, below the answer, measures how fast plain decoding is here.";
  if (against >= 1.05) speed = `The text ${now ? "comes" : "came"} about ${number(against, 1)} times as fast as without drafting.`;
  else if (against >= .95) speed = `That ${now ? "is" : "was"} about as fast as without drafting.`;
  else if (against) speed = `That ${now ? "is" : "was"} slower than without drafting: ${number(against, 2)} times the speed.`;
  return `${each} ${speed}`;
}

// ---- The chart ---------------------------------------------------------------------------------------------------

const BAR = 4, GAP = 1, LEFT = 20;
const visibleSteps = () => Math.max(1, Math.floor((chart.clientWidth - LEFT) / (BAR + GAP)));

/** @param {Answer | null} shown */
function drawChart(shown) {
  const steps = shown ? shown.steps : [], width = chart.clientWidth, height = chart.clientHeight, scale = devicePixelRatio || 1;
  if (chart.width !== Math.round(width * scale)) chart.width = Math.round(width * scale);
  if (chart.height !== Math.round(height * scale)) chart.height = Math.round(height * scale);
  const brush = chart.getContext("2d");
  if (!brush) return;
  brush.setTransform(scale, 0, 0, scale, 0, 0);
  brush.clearRect(0, 0, width, height);
  const colours = new Map(legend.map(({ source, part }) => [source, getComputedStyle(part).backgroundColor]));
  const ink = getComputedStyle($("model")).color;
  const first = Math.max(0, steps.length - visibleSteps()), seen = steps.slice(first);
  const top = Math.max(4, ...seen.map(step => step.length));
  const y = (/** @type {number} */ tokens) => height - 4 - tokens * (height - 14) / top;
  brush.font = `11px ${getComputedStyle(document.body).fontFamily}`;
  brush.textAlign = "right";
  brush.textBaseline = "middle";
  for (const line of new Set([1, Math.round(top / 2), top])) {
    brush.fillStyle = ink;
    brush.globalAlpha = 1;
    brush.fillText(String(line), LEFT - 6, y(line));
    brush.globalAlpha = .25;
    brush.fillRect(LEFT, Math.round(y(line)), width - LEFT, 1);
  }
  seen.forEach((step, place) => {
    const x = LEFT + place * (BAR + GAP);
    brush.globalAlpha = state.marked?.answer === shown && state.marked?.step !== first + place ? .35 : 1;
    step.forEach(({ source }, n) => {
      brush.fillStyle = colours.get(source) || ink;
      brush.fillRect(x, y(n + 1), BAR, y(n) - y(n + 1) - (top > 24 ? 0 : .5));
    });
  });
  brush.globalAlpha = 1;
  drawMean(brush, steps, first, y, ink);
  chart.setAttribute("aria-label", shown && steps.length
    ? `${counted(steps.length, "step")}, on average ${number(shown.mat, 2)} tokens in a step. The largest step shown has ${top}.`
    : "There are no steps yet.");
}

/** Draw the mean tokens of the steps so far.
    @param {CanvasRenderingContext2D} brush @param {Word[][]} steps @param {number} first
    @param {(tokens: number) => number} y @param {string} ink */
function drawMean(brush, steps, first, y, ink) {
  let tokens = 0;
  brush.strokeStyle = ink;
  brush.lineWidth = 1.5;
  brush.beginPath();
  steps.forEach((step, place) => {
    tokens += step.length;
    if (place >= first) brush.lineTo(LEFT + (place - first) * (BAR + GAP) + BAR / 2, y(tokens / (place + 1)));
  });
  brush.stroke();
}

chart.addEventListener("pointermove", event => {
  const { shown } = state;
  if (!shown) return;
  const first = Math.max(0, shown.steps.length - visibleSteps());
  const step = first + Math.floor((event.offsetX - LEFT) / (BAR + GAP));
  mark(step >= first && step < shown.steps.length ? { answer: shown, step } : null);
});
chart.addEventListener("pointerleave", () => mark(null));
addEventListener("resize", repaint);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", repaint);

/** Keep the end of a growing answer in view, until the user scrolls back. */
function follow() {
  if (!state.followed) return;
  state.followed.answer.foot.scrollIntoView({ block: "nearest" });
  if (!state.running) state.followed = null;
}

document.addEventListener("scroll", () => {
  if (!state.followed) return;
  // The log scrolls, or in a narrow window the page.
  const top = state.followed.log.scrollTop + (document.scrollingElement?.scrollTop || 0);
  if (top < state.followed.top) state.followed = null;
  else state.followed.top = top;
}, true);
