// The comparison of an answer with plain decoding: the same request again, without drafting.

import { make, number, speedText } from "./dom.js";
import { state } from "./state.js";
import { announce, Answer } from "./answer.js";
import { learnPlain, repaint } from "./figures.js";
import { report, say } from "./server.js";
import { generate } from "./generate.js";

/** Run an answer again without drafting, and show both speeds below it.
    @param {Answer} drafted @param {HTMLElement} again */
export async function compare(drafted, again) {
  if (state.running) return;
  say(null);
  const { path, body, model } = drafted.request;
  const plain = new Answer({ path, body: { ...body, rest_local: { ...body.rest_local, policy: "off" } }, model });
  const bars = [make("i", "drafted"), make("i")], figures = [make("span"), make("span")], verdict = make("p");
  const race = make("div", "race", "drafted", bars[0], figures[0], "plain", bars[1], figures[1]);
  const text = make("details", "", make("summary", "", "Text without drafting"), plain.text);
  const old = drafted.element.querySelector(".versus");
  const card = make("div", "versus", race, verdict, text);
  if (old) old.replaceWith(card);
  else drafted.element.append(card);
  card.scrollIntoView({ block: "nearest" });
  const draw = () => {
    const fastest = Math.max(drafted.speed, plain.speed) || 1;
    [drafted, plain].forEach((answer, n) => {
      bars[n].style.width = `${100 * answer.speed / fastest}%`;
      figures[n].textContent = answer.speed ? `${speedText(answer.speed)} tokens/s` : "";
    });
  };
  draw();
  verdict.textContent = "The same request runs again without drafting.";
  try {
    const how = await generate(plain, draw);
    plain.finish(how);
    draw();
    learnPlain(plain);
    if (plain.speed && how !== "stopped") drafted.plainMs = 1000 / plain.speed;
    verdict.textContent = how === "stopped" ? "The comparison was stopped." : judged(drafted, plain);
    announce(verdict.textContent);
  } catch (error) {
    card.remove();
    report(error);
  } finally {
    repaint();
    card.scrollIntoView({ block: "nearest" });
    again.focus({ preventScroll: true });
  }
}

/** Say how both answers compare.
    @param {Answer} drafted @param {Answer} plain */
function judged(drafted, plain) {
  const times = plain.speed ? drafted.speed / plain.speed : 0;
  const speed = times ? `Drafting was ${number(times, 2)} times as fast as plain decoding. ` : "";
  if (drafted.content === plain.content) return `${speed}Both texts are the same.`;
  let same = 0;
  while (drafted.content[same] === plain.content[same]) same += 1;
  return `${speed}The texts differ after ${number(same)} characters. Two tokens were almost equally likely there, and ` +
    "rounding decided. The server's option --exact prevents that.";
}

