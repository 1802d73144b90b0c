"use strict";
// Elements, words, numbers, and text of others made harmless to look at. Knows nothing of models and conversations.

const $ = id => document.getElementById(id);

/** An element. Strings become text nodes: text of a model is never parsed as markup. */
function make(tag, className, ...children) {
  const made = document.createElement(tag);
  if (className) made.className = className;
  made.append(...children);
  return made;
}

/** A button that does `act`. `label`: its name for screen readers, where the text is a sign. */
function button(text, act, label = "") {
  const made = make("button", "quiet", text);
  made.type = "button";
  if (label) made.setAttribute("aria-label", label);
  made.addEventListener("click", act);
  return made;
}

const number = (value, digits = 0) =>
  value.toLocaleString("en", { minimumFractionDigits: digits, maximumFractionDigits: digits });
const speedText = value => number(value, value < 100 ? 1 : 0);
const counted = (count, one, many = `${one}s`) => `${number(count)} ${count === 1 ? one : many}`;
const sizeText = bytes => bytes < 1000 ? `${bytes} B` : bytes < 1e6 ? `${number(bytes / 1e3)} kB` : `${number(bytes / 1e6, 1)} MB`;

class Problem extends Error {
  constructor(message, code) { super(message); this.code = code }
}

// ---- Characters that cannot be seen ------------------------------------------------------------------------------

// Controls, marks that turn the direction of text, spaces of no width, tags. The first alternative are joiners where
// they have a meaning: within an emoji, and after a letter of a script that is joined.
const HIDDEN = new RegExp(
  "((?<=[\\p{Extended_Pictographic}\\u{1f3fb}-\\u{1f3ff}\\ufe0f])\\u200d(?=\\p{Extended_Pictographic})"
  + "|(?<=[\\p{Script=Arabic}\\p{Script=Syriac}\\p{Script=Devanagari}\\p{Script=Bengali}\\p{Script=Malayalam}"
  + "\\p{Script=Sinhala}\\p{Script=Tamil}\\p{Script=Telugu}\\p{Script=Kannada}])[\\u200c\\u200d]"
  + "|\\r(?=\\n))"
  + "|[\\0-\\x08\\x0b-\\x1f\\x7f-\\x9f\\xad\\u034f\\u061c\\u115f\\u1160\\u17b4\\u17b5\\u180b-\\u180e\\u200b-\\u200f"
  + "\\u2028-\\u202e\\u2060-\\u206f\\u3164\\ufe00-\\ufe0d\\ufeff\\uffa0\\ufff0-\\ufffb\\u{1d173}-\\u{1d17a}"
  + "\\u{e0000}-\\u{e0fff}]", "gu");

/** Such characters in words: [U+202E]. */
const spelled = text => [...text].map(each => `[U+${each.codePointAt(0).toString(16).toUpperCase().padStart(4, "0")}]`).join("");

/** Text with what cannot be seen written out. */
const printable = text => text.replace(HIDDEN, (all, kept) => kept === undefined ? spelled(all) : all);

/** One line for titles and names. */
const oneLine = (text, longest) => {
  const line = printable(text.slice(0, 4 * longest).replace(/\s+/g, " ").trim());
  return line.length > longest ? `${line.slice(0, longest - 1).trimEnd()}…` : line;
};

// ---- Storage of settings -----------------------------------------------------------------------------------------

/** The browser's storage if the user allows it; otherwise nothing is stored. */
function stored(kind, name, value) {
  try {
    if (value !== undefined) window[kind].setItem(name, value);
    return window[kind].getItem(name);
  } catch {
    return null;
  }
}

// ---- Copying ----------------------------------------------------------------------------------------------------

/** A button that copies what `text` returns. Null where the browser has no clipboard: plain HTTP from another machine.
    Its word comes from the style sheet, because it may lie in the middle of an answer, whose text it is no part of. */
function copyButton(text, label) {
  if (!navigator.clipboard) return null;
  const made = button("", async () => {
    const copied = await navigator.clipboard.writeText(text()).then(() => true, () => false);
    made.dataset.says = copied ? "Copied" : "Not allowed";
    setTimeout(() => { made.dataset.says = "Copy" }, 1500);
  }, label);
  made.dataset.says = "Copy";
  return made;
}
