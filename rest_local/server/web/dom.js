// Elements, words, numbers, and text of others made harmless to look at. Knows nothing of models and conversations.

/** Return an element of page.html.
    @param {string} id */
export const $ = id => /** @type {HTMLElement} */ (document.getElementById(id));

/** Return an element of page.html that has a value: an input, a select or a textarea.
    @param {string} id */
export const field = id => /** @type {HTMLInputElement} */ ($(id));

/** Return the first element that a selector finds, or throw.
    @param {ParentNode} parent @param {string} selector @returns {HTMLElement} */
export function within(parent, selector) {
  const found = parent.querySelector(selector);
  if (found instanceof HTMLElement) return found;
  throw new Error(`The page has no ${selector}.`);
}

/** Make an element. Strings become text nodes: text of a model is never parsed as markup.
    @template {keyof HTMLElementTagNameMap} Tag
    @param {Tag} tag @param {string} [className] @param {...(Node | string)} children */
export function make(tag, className, ...children) {
  const made = document.createElement(tag);
  if (className) made.className = className;
  made.append(...children);
  return made;
}

/** Make a button that does `act`. Screen readers say `label`, or its text.
    @param {string} text @param {(event: MouseEvent) => unknown} act */
export function button(text, act, label = "") {
  const made = make("button", "quiet", text);
  made.type = "button";
  if (label) made.setAttribute("aria-label", label);
  made.addEventListener("click", act);
  return made;
}

/** @param {number} value */
export const number = (value, digits = 0) =>
  value.toLocaleString("en", { minimumFractionDigits: digits, maximumFractionDigits: digits });
/** @param {number} value */
export const speedText = value => number(value, value < 100 ? 1 : 0);
/** Return the count with its noun: "1 step", "2 steps".
    @param {number} count @param {string} one */
export const counted = (count, one, many = `${one}s`) => `${number(count)} ${count === 1 ? one : many}`;
/** @param {number} bytes */
export const sizeText = bytes => bytes < 1000 ? `${bytes} B` : bytes < 1e6 ? `${number(bytes / 1e3)} kB` : `${number(bytes / 1e6, 1)} MB`;

export class Problem extends Error {
  /** @param {string} message @param {string} [code] */
  constructor(message, code) { super(message); this.code = code }
}

// ---- Characters that cannot be seen ------------------------------------------------------------------------------

// Controls, marks that turn the direction of text, spaces of no width, tags. The first alternative are joiners where
// they have a meaning: within an emoji, and after a letter of a script that is joined.
export const HIDDEN = new RegExp(
  "((?<=[\\p{Extended_Pictographic}\\u{1f3fb}-\\u{1f3ff}\\ufe0f])\\u200d(?=\\p{Extended_Pictographic})"
  + "|(?<=[\\p{Script=Arabic}\\p{Script=Syriac}\\p{Script=Devanagari}\\p{Script=Bengali}\\p{Script=Malayalam}"
  + "\\p{Script=Sinhala}\\p{Script=Tamil}\\p{Script=Telugu}\\p{Script=Kannada}])[\\u200c\\u200d]"
  + "|\\r(?=\\n))"
  + "|[\\0-\\x08\\x0b-\\x1f\\x7f-\\x9f\\xad\\u034f\\u061c\\u115f\\u1160\\u17b4\\u17b5\\u180b-\\u180e\\u200b-\\u200f"
  + "\\u2028-\\u202e\\u2060-\\u206f\\u3164\\ufe00-\\ufe0d\\ufeff\\uffa0\\ufff0-\\ufffb\\u{1d173}-\\u{1d17a}"
  + "\\u{e0000}-\\u{e0fff}]", "gu");

/** Write such characters out: [U+202E].
    @param {string} text */
export const spelled = text => [...text].map(each => `[U+${Number(each.codePointAt(0)).toString(16).toUpperCase().padStart(4, "0")}]`).join("");

/** Return text with what cannot be seen written out.
    @param {string} text */
export const printable = text => text.replace(HIDDEN, (all, kept) => kept === undefined ? spelled(all) : all);

/** Return one line for titles and names.
    @param {string} text @param {number} longest */
export const oneLine = (text, longest) => {
  const line = printable(text.slice(0, 4 * longest).replace(/\s+/g, " ").trim());
  return line.length > longest ? `${line.slice(0, longest - 1).trimEnd()}…` : line;
};

// ---- Storage of settings -----------------------------------------------------------------------------------------

/** Store a value if there is one, and return what is stored under the name. Null if the user allows no storage.
    @param {"localStorage" | "sessionStorage"} kind @param {string} name @param {string} [value] */
export function stored(kind, name, value) {
  try {
    if (value !== undefined) window[kind].setItem(name, value);
    return window[kind].getItem(name);
  } catch {
    return null;
  }
}

// ---- Copying ----------------------------------------------------------------------------------------------------

/** Make a button that copies what `text` returns. Null where the browser has no clipboard: plain HTTP from another
    machine. The style sheet writes its word, because it may lie in an answer, and is not part of the answer's text.
    @param {() => string} text @param {string} label */
export function copyButton(text, label) {
  if (!navigator.clipboard) return null;
  const made = button("", async () => {
    const copied = await navigator.clipboard.writeText(text()).then(() => true, () => false);
    made.dataset.says = copied ? "Copied" : "Not allowed";
    setTimeout(() => { made.dataset.says = "Copy" }, 1500);
  }, label);
  made.dataset.says = "Copy";
  return made;
}
