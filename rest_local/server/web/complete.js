// Completing a text and filling a gap: calls without a conversation.

import { $, button, copyButton, field, within } from "./dom.js";
import { state } from "./state.js";
import { Answer } from "./answer.js";
import { server } from "./server.js";
import { common, perform } from "./generate.js";
import { compare } from "./compare.js";

/** Complete a text, or fill a gap.
    @param {string} mode */
export async function once(mode) {
  const fills = mode === "infill", source = field(fills ? "before" : "text");
  const given = source.value, follows = fills ? field("after").value : "";
  if (state.running || !given && !follows) return;
  const prompt = fills ? { input_prefix: given, input_suffix: follows } : { prompt: given };
  const request = { path: fills ? "/infill" : "/completion", body: { ...prompt, ...common() }, model: server.model };
  const log = within($(mode), ".log"), empty = within(log, ".empty"), answer = new Answer(request, given, follows);
  empty.hidden = true;
  for (const old of log.querySelectorAll("article")) old.remove();
  log.append(answer.element);
  await perform(answer, log);
  if (!answer.content && !answer.reason) {
    answer.element.remove();
    empty.hidden = false;
    return;
  }
  if (answer.reason && answer.drafts) {
    const again = button("Run again without drafting", () => compare(answer, again));
    again.classList.add("idle");
    answer.tools.append(again);
  }
  if (answer.content) {
    answer.tools.append(button("Add to the text", () => {
      source.value = given + answer.content;
      source.focus();
    }));
  }
  const copy = copyButton(() => answer.content, "Copy this text");
  if (copy) answer.tools.append(copy);
}
