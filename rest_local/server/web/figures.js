"use strict";
// The figures of an answer, in numbers, in words and as a chart; the legend of the sources.

const RARE = ["drafter", "grammar", "edit"];
let shown = null; // the answer whose figures are shown
let marked = null; // the step under the pointer or the focus
let painting = false;
let running = null; // aborts the running request
let followed = null; // { log, answer, top }: the growing answer and its scroll position

for (const [source, [name, why]] of Object.entries(LEGEND)) {
  const row = make("li", "", make("span", `swatch ${source}`, name), make("span", "why", why), make("b", "", ""));
  row.hidden = RARE.includes(source); // until there is one
  $("legend").append(row);
  $("share").append(make("i", source));
}

function repaint() {
  if (painting) return;
  painting = true;
  requestAnimationFrame(() => { painting = false; paint(); follow() });
}

function paint() {
  const steps = shown ? shown.steps : [], against = shown && shown.tokens ? againstPlain(shown) : 0;
  $("speed").textContent = shown && shown.speed ? speedText(shown.speed) : "–";
  $("mat").textContent = steps.length ? number(shown.mat, 2) : "–";
  $("drafted").textContent = steps.length ? `${number(100 * shown.drafted)} %` : "–";
  $("factor").textContent = against ? `${number(against, 1)} ×` : "–";
  $("words").textContent = inWords(shown, against);
  const live = running && steps.length;
  $("live").textContent = live ? `${$("speed").textContent} tokens/s${against ? `, ${number(against, 1)} × plain` : ""}` : "";
  $("withheld").hidden = !(shown && shown.withheld && !steps.length);
  $("chart").hidden = !$("withheld").hidden;
  Object.keys(LEGEND).forEach((source, place) => {
    const share = steps.length ? shown.counts[source] / shown.tokens : 0;
    const row = $("legend").children[place];
    row.lastChild.textContent = share ? share < .005 ? "< 1 %" : `${number(100 * share)} %` : "";
    row.hidden = RARE.includes(source) && !share;
    $("share").children[place].style.width = `${100 * share}%`;
  });
  if (!$("chart").hidden) drawChart(steps);
}

// ---- Against plain decoding --------------------------------------------------------------------------------------

// What a plain step takes, in milliseconds, by model, as the server said last: the next answer is compared with it while
// it is written. The server knows when it has measured that.
const plainSteps = new Map();

function learnPlain({ draft, request }) {
  if (draft && draft.plain_step_ms) plainSteps.set(request.model, draft.plain_step_ms);
}

/** How many times as fast as plain decoding; 0 where that is not known. */
function againstPlain(answer) {
  const { draft, plainMs, request, timings } = answer;
  if (!answer.drafts) return 1;
  if (timings && !timings.draft_n && !plainMs) return 0; // lookups cost less than can be told from one answer
  const ms = plainMs || (draft ? draft.plain_step_ms : plainSteps.get(request.model));
  return ms ? answer.speed * ms / 1000 : 0;
}

/** The figures for readers who do not know the terms. */
function inWords(answer, against) {
  if (!answer || !answer.tokens) return "The speed of the next answer is shown here while it is written.";
  if (!answer.drafts) return "Plain decoding: each token took a step of its own.";
  const now = running && running.answer === answer, gave = now ? "gives" : "gave";
  const each = `A step of the model ${gave} ${number(answer.mat, 1)} tokens in the mean; without drafting it gives 1.`;
  let speed = "How fast plain decoding is here, “Run again without drafting” measures.";
  if (against >= 1.05) speed = `The text ${now ? "comes" : "came"} about ${number(against, 1)} times as fast as without drafting.`;
  else if (against >= .95) speed = `That ${now ? "is" : "was"} about as fast as without drafting.`;
  else if (against) speed = `That ${now ? "is" : "was"} slower than without drafting: ${number(against, 2)} times the speed.`;
  return `${each} ${speed}`;
}

// ---- The chart ---------------------------------------------------------------------------------------------------

const BAR = 4, GAP = 1, LEFT = 20;
const visibleSteps = () => Math.max(1, Math.floor(($("chart").clientWidth - LEFT) / (BAR + GAP)));

function drawChart(steps) {
  const canvas = $("chart"), width = canvas.clientWidth, height = canvas.clientHeight, scale = devicePixelRatio || 1;
  if (canvas.width !== Math.round(width * scale)) canvas.width = Math.round(width * scale);
  if (canvas.height !== Math.round(height * scale)) canvas.height = Math.round(height * scale);
  const brush = canvas.getContext("2d");
  brush.setTransform(scale, 0, 0, scale, 0, 0);
  brush.clearRect(0, 0, width, height);
  const colours = [...$("share").children].map(each => getComputedStyle(each).backgroundColor); // resolved for the theme
  const sources = Object.keys(LEGEND), ink = getComputedStyle($("model")).color;
  const first = Math.max(0, steps.length - visibleSteps()), seen = steps.slice(first);
  const top = Math.max(4, ...seen.map(step => step.length));
  const y = tokens => height - 4 - tokens * (height - 14) / top;
  brush.font = `11px ${getComputedStyle(document.body).fontFamily}`;
  brush.textAlign = "right";
  brush.textBaseline = "middle";
  for (const line of new Set([1, Math.round(top / 2), top])) {
    brush.fillStyle = ink;
    brush.globalAlpha = 1;
    brush.fillText(line, LEFT - 6, y(line));
    brush.globalAlpha = .25;
    brush.fillRect(LEFT, Math.round(y(line)), width - LEFT, 1);
  }
  seen.forEach((step, place) => {
    const x = LEFT + place * (BAR + GAP);
    brush.globalAlpha = marked && marked.answer === shown && marked.step !== first + place ? .35 : 1;
    step.forEach(({ source }, n) => {
      brush.fillStyle = colours[sources.indexOf(source)];
      brush.fillRect(x, y(n + 1), BAR, y(n) - y(n + 1) - (top > 24 ? 0 : .5));
    });
  });
  brush.globalAlpha = 1;
  drawMean(brush, steps, first, y, ink);
  canvas.setAttribute("aria-label", steps.length
    ? `${number(steps.length)} steps, ${number(shown.mat, 2)} tokens a step in the mean, ${top} at most in the newest`
    : "no steps yet");
}

function drawMean(brush, steps, first, y, ink) { // mean accepted tokens at each step
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

$("chart").addEventListener("pointermove", event => {
  if (!shown) return;
  const first = Math.max(0, shown.steps.length - visibleSteps());
  const step = first + Math.floor((event.offsetX - LEFT) / (BAR + GAP));
  mark(step >= first && step < shown.steps.length ? { answer: shown, step } : null);
});
$("chart").addEventListener("pointerleave", () => mark(null));
addEventListener("resize", repaint);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", repaint);

/** Keeps the end of a growing answer in view, until the user scrolls back. */
function follow() {
  if (!followed) return;
  followed.answer.foot.scrollIntoView({ block: "nearest" });
  if (!running) followed = null;
}

document.addEventListener("scroll", () => {
  if (!followed) return;
  const top = followed.log.scrollTop + document.scrollingElement.scrollTop; // the log scrolls, in a narrow window the page
  if (top < followed.top) followed = null;
  else followed.top = top;
}, true);
