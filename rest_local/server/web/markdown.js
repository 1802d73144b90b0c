// Light Markdown: lines of an answer as they arrive. Every character stays in the document, and with it every token and
// its source; marks of Markdown are hidden by the style sheet. Knows nothing of the server.

import { copyButton, counted, HIDDEN, make, printable, spelled } from "./dom.js";
import { colour, colourAtTimes } from "./colours.js";

/** @import { Word } from "./types.js" */
/** @typedef {{ text: string, word: Word | null }} Part */
/** @typedef {{ from: number, to: number, href: string }} Link */
/** @typedef {{ kind: string, fence?: string, links?: Link[], cells?: number[] }} Kind */
/** @typedef {Kind & { styles: string[] }} Look */
/** @typedef {Part & { style: string, href?: string, cell?: number }} Run */
/**
 * A line on the page; `left` counts its characters that are not shown.
 * @typedef {{
 *   element: HTMLElement, parts: Part[], made: (Run & { element: HTMLElement })[], look: Look | null,
 *   length: number, left: number, note: HTMLElement | null,
 * }} Line
 */
/** @typedef {(from: number, to: number, style?: string) => unknown} Mark */

const LONG_LINE = 4000; // characters; longer lines are not parsed again for each of their tokens, which would block the page
// Laying out a line of 1 MB takes minutes, and an element for each of 200 000 tokens takes seconds.
const MOST_OF_LINE = 20_000; // characters of a line that are shown
export const MOST_SHOWN = 200_000; // characters of an answer that are shown
/** The token of an element.
    @type {WeakMap<Element, Word>} */
export const told = new WeakMap();
/** @type {WeakMap<Element, Line>} */
const lines = new WeakMap();

/** Make the element of a part of a token, or of text without a known token. It may be a part of the address `href`.
    @param {string} text @param {string} style @param {Word | null} word */
export function written(text, style, word, href = "") {
  const className = word ? `${word.source} ${style}`.trim() : style;
  const made = make(word && word.source !== "own" ? "mark" : "span", className);
  const shown = style.includes("escape") ? spelled(text) : text;
  if (href) made.append(linked(shown, href));
  else made.append(shown);
  if (!word) return made;
  told.set(made, word);
  word.elements.push(made);
  made.tabIndex = word.answer.stop === word && seen(word) === made ? 0 : -1;
  return made;
}

/** Make a link. Only http and https come here (`ADDRESS`), and what is clicked is what is read.
    @param {string} text @param {string} href */
function linked(text, href) {
  const link = make("a", "", text);
  link.href = href;
  link.title = link.href;
  link.target = "_blank";
  link.rel = "noopener noreferrer";
  link.referrerPolicy = "no-referrer";
  return link;
}

/** Return the element of a word that can be seen. Marks of Markdown are hidden.
    @param {Word} word */
export const seen = word => word.elements.find(each => !each.classList.contains("syntax"));

/** Writes an answer line by line, before the element that follows it. Only the newest line can still change its style.
    Of text that the user has typed, only code blocks have a style. */
export class Sheet {
  /** @param {HTMLElement} text @param {HTMLElement} end */
  constructor(text, end, typed = false) {
    this.text = text;
    this.end = end;
    this.typed = typed;
    /** The newest line, until it ends.
        @type {Line | null} */
    this.line = null;
    /** The newest line.
        @type {Line | null} */
    this.last = null;
    /** The code block of the newest line.
        @type {HTMLElement | null} */
    this.block = null;
    this.fence = "";
    this.shown = 0;
    this.left = 0;
    /** @type {HTMLElement | null} */
    this.note = null;
  }

  /** @param {string} text @param {Word | null} [word] */
  write(text, word = null) {
    for (const part of text.split(/(?<=\n)/)) {
      if (this.shown >= MOST_SHOWN) {
        this.leaveOut(part.length);
        continue;
      }
      const line = this.line || this.begin(), ends = part.endsWith("\n");
      line.parts.push({ text: part, word });
      const long = line.left || line.length + part.length > MOST_OF_LINE;
      this.shown += long ? 0 : part.length;
      if (long) this.cut(line, part);
      else if (line.length < LONG_LINE || ends) this.show(line);
      else {
        line.length += part.length;
        this.put(line, { text: printable(part), style: "", word });
      }
      if (ends) this.line = null;
      if (ends && this.block) colourAtTimes(this.block);
    }
  }

  /** There will be no more. */
  finish() {
    this.end.remove();
    if (this.block) colour(this.block);
  }

  begin() {
    const fence = this.last?.look?.fence || "";
    if (fence && !this.block && this.last) this.block = this.openBlock(this.last.element);
    if (!fence && this.block) {
      colour(this.block);
      this.block = null;
    }
    this.fence = fence;
    /** @type {Line} */
    const line = { element: make("div"), parts: [], made: [], look: null, length: 0, left: 0, note: null };
    lines.set(line.element, line);
    if (this.block) this.block.append(line.element);
    else this.text.lastElementChild?.before(line.element);
    line.element.append(this.end);
    return this.line = this.last = line;
  }

  /** Put the line that opened a code block into an element of its own, with a button that copies the code.
      @param {HTMLElement} opening */
  openBlock(opening) {
    const block = make("div", "block");
    opening.before(block);
    const code = () => [...block.querySelectorAll(".code")].map(each => sourceOf(lines.get(each))).join("");
    const copy = copyButton(() => code().replace(/\n$/, ""), "Copy this code");
    block.append(opening, ...(copy ? [copy] : []));
    return block;
  }

  /** Give a line its look anew.
      @param {Line} line */
  show(line) {
    const text = sourceOf(line), focused = document.activeElement;
    line.length = text.length; // a long line keeps its style until it ends
    line.look = lookOf(text, this.fence, this.typed);
    line.element.className = `line ${line.look.kind}`;
    const runs = runsOf(line.parts, line.look);
    let same = 0;
    while (same < line.made.length && same < runs.length && sameRun(line.made[same], runs[same])) same += 1;
    for (const { element, word } of line.made.splice(same)) {
      const cell = element.parentElement;
      element.remove();
      if (cell && cell !== line.element && !cell.childElementCount) cell.remove();
      if (word) word.elements.splice(word.elements.indexOf(element), 1);
    }
    for (const run of runs.slice(same)) this.put(line, run);
    const word = focused && told.get(focused);
    if (word && !focused.isConnected) seen(word)?.focus();
  }

  /** @param {Line} line @param {Run} run */
  put(line, run) {
    const element = written(run.text, run.style, run.word, run.href);
    if (run.cell === undefined) this.end.before(element);
    else {
      /** @type {HTMLElement | null} */
      let cell = line.element.querySelector(`:scope > [data-cell="${run.cell}"]`);
      if (!cell) {
        cell = make("span", "cell");
        cell.dataset.cell = String(run.cell);
        this.end.before(cell);
      }
      cell.append(element);
    }
    line.made.push({ ...run, element });
  }

  /** Count the rest of a giant line, and do not show it.
      @param {Line} line @param {string} part */
  cut(line, part) {
    const room = line.left ? 0 : MOST_OF_LINE - line.length;
    if (!line.look) { // it begins with a giant part
      line.look = lookOf("", this.fence, this.typed);
      line.element.className = `line ${line.look.kind}`;
    }
    if (room > 0) this.put(line, { text: printable(part.slice(0, room)), style: "", word: line.parts.at(-1)?.word || null });
    line.length += Math.max(0, room);
    line.left += part.length - Math.max(0, room);
    if (!line.note) this.end.before(line.note = make("span", "left"));
    line.note.textContent = ` … and ${counted(line.left, "character")} more in this line; Copy has all of them.`;
  }

  /** @param {number} count */
  leaveOut(count) {
    this.left += count;
    if (!this.note) {
      this.note = make("p", "left hint");
      this.text.after(this.note);
    }
    this.note.textContent = `${counted(this.left, "character")} more are not shown, to keep the page quick; Copy has all of them.`;
  }
}

/** @param {Line | undefined} line */
const sourceOf = line => line ? line.parts.map(part => part.text).join("") : "";

/** @param {Run} one @param {Run} other */
const sameRun = (one, other) => one.text === other.text && one.style === other.style && one.word === other.word
  && one.href === other.href && one.cell === other.cell;

/** Return the text of a line in runs of one token and one style, address and cell.
    @param {Part[]} parts @param {Look} look */
function runsOf(parts, { styles, links, cells }) {
  /** @type {Run[]} */
  const runs = [];
  let at = 0;
  for (const { text, word } of parts) {
    for (let from = 0; from < text.length;) {
      const link = links && links.find(each => each.from <= at + from && at + from < each.to);
      const same = (/** @type {number} */ to) => styles[at + to] === styles[at + from] && (!cells || cells[at + to] === cells[at + from])
        && !(link && at + to === link.to);
      let to = from + 1;
      while (to < text.length && same(to)) to += 1;
      runs.push({ text: text.slice(from, to), style: styles[at + from], word, href: link ? link.href : "",
        cell: cells ? cells[at + from] : undefined });
      from = to;
    }
    at += text.length;
  }
  return runs;
}

/** Return the look of a line: its kind, a style for each of its characters, its links, the cells of a row of a table,
    and the fence of the next line. `fence` is the marker that opened the code block of the line, if any.
    @param {string} text @param {string} fence @returns {Look} */
function lookOf(text, fence, typed = false) {
  const styles = new Array(text.length).fill(""), line = text.replace(/\n$/, "");
  const look = lookOfKind(line, fence, styles, typed);
  for (const found of text.matchAll(HIDDEN)) {
    if (found[1] === undefined) styles.fill("escape", found.index, found.index + found[0].length);
  }
  return { fence: "", ...look, styles };
}

const ROW = /^\s*\|.*\|\s*$/, RULE = /^\s*\|(\s*:?-+:?\s*\|)+\s*$/;

/** @param {string} line @param {string} fence @param {string[]} styles @param {boolean} typed @returns {Kind} */
function lookOfKind(line, fence, styles, typed) {
  /** @type {Mark} */
  const marks = (from, to, style = "syntax") => styles.fill(style, from, to);
  const ticks = (/^( {0,3})(`{3,}|~{3,})(.*)$/.exec(line) || []);
  if (fence) {
    const closes = ticks[2] && ticks[2][0] === fence[0] && ticks[2].length >= fence.length && !ticks[3].trim();
    if (closes) marks(0, line.length);
    return closes ? { kind: "fence close" } : { kind: "code", fence };
  }
  if (ticks[2] && !ticks[3].includes("`")) {
    marks(0, ticks[1].length + ticks[2].length);
    return { kind: "fence open", fence: ticks[2] };
  }
  if (typed) return { kind: "" };
  if (/^ {0,3}([-*_])[ \t]*(\1[ \t]*){2,}$/.test(line)) {
    marks(0, line.length);
    return { kind: "hr" };
  }
  const links = line.length < LONG_LINE ? inline(line, styles, marks) : [];
  if (ROW.test(line)) return { kind: RULE.test(line) ? "row rule" : "row", links, cells: cellsOf(line, styles, marks) };
  const head = /^ {0,3}(#{1,6})[ \t]+\S/.exec(line), item = /^\s*([-*+]|\d{1,9}[.)])[ \t]+\S/.exec(line);
  const quote = /^ {0,3}>[ \t]?/.exec(line);
  if (head) marks(0, head[0].length - 1);
  if (item) marks(0, item[0].length - 1, "bullet");
  if (quote) marks(0, quote[0].length);
  const kind = head ? `head h${head[1].length}` : item ? "item" : quote ? "quote" : line.trim() ? "" : "blank";
  return { kind, links };
}

/** Return the number of the cell of each character of a row. The bars between cells are marks.
    @param {string} line @param {string[]} styles @param {Mark} marks */
function cellsOf(line, styles, marks) {
  const cells = [];
  let cell = -1;
  for (let at = 0; at < line.length; at += 1) {
    const bar = line[at] === "|" && line[at - 1] !== "\\" && !styles[at].includes("inline");
    if (bar) marks(at, at + 1);
    if (bar && line.slice(at + 1).trim()) cell += 1;
    cells.push(Math.max(cell, 0));
  }
  cells.push(Math.max(cell, 0)); // the end of the line
  return cells;
}

const ADDRESS = /https?:\/\/[^\s<>()[\]{}"'`\\^|\0]*[^\s<>()[\]{}"'`\\^|\0.,;:!?*_]/g;

/** Style code between backticks, and outside of it addresses, bold and italic text. Return the addresses.
    @param {string} line @param {string[]} styles @param {Mark} marks */
function inline(line, styles, marks) {
  const blank = (/** @type {string} */ text, /** @type {number} */ at, /** @type {string} */ style) => {
    marks(at, at + text.length, style);
    return "\0".repeat(text.length);
  };
  /** @type {Link[]} */
  const links = [];
  let bare = line.replace(/(?<!`)(`+)(?!`)(.*?[^`])\1(?!`)/g, (all, ticks, code, at) => {
    const made = blank(all, at, "inline");
    marks(at, at + ticks.length);
    marks(at + all.length - ticks.length, at + all.length);
    return made;
  });
  bare = bare.replace(ADDRESS, (href, at) => {
    if (!URL.canParse(href) || printable(href) !== href) return href;
    links.push({ from: at, to: at + href.length, href });
    return blank(href, at, "link");
  });
  for (const found of bare.matchAll(/\*\*(?=[^\s*])(.*?[^\s*])\*\*(?!\*)/g)) enclosed(found, 2, "bold", styles, marks);
  for (const found of bare.matchAll(/(?<![*\w\\])\*(?=[^\s*])([^*]*[^\s*])\*(?![*\w])|(?<![_\w\\])_(?=[^\s_])([^_]*[^\s_])_(?![_\w])/g)) {
    enclosed(found, 1, "italic", styles, marks);
  }
  return links;
}

/** @param {RegExpExecArray} found @param {number} width @param {string} style @param {string[]} styles @param {Mark} marks */
function enclosed(found, width, style, styles, marks) {
  const from = found.index, to = from + found[0].length;
  for (let at = from + width; at < to - width; at += 1) {
    if (styles[at] !== "syntax") styles[at] = `${styles[at]} ${style}`.trim();
  }
  marks(from, from + width);
  marks(to - width, to);
}
