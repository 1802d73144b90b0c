// Colours of code. highlight.js reads the text, and the browser paints ranges of it (CSS custom highlights): the document
// stays as it is, and no text becomes markup. Browsers without custom highlights show code in one colour.

import hljs from "./highlight.js";

/** @typedef {[from: number, to: number, paint: string]} Found */

const MOST_COLOURED = 50_000; // characters of a block
/** Maps the first word of a scope of highlight.js to its name in the style sheet.
    @type {Record<string, string>} */
const PAINTS = {
  keyword: "keyword", tag: "keyword", name: "keyword", "selector-tag": "keyword", section: "title", title: "title",
  built_in: "type", type: "type", class: "type", string: "string", regexp: "string", char: "string", addition: "string",
  number: "number", literal: "number", symbol: "number", attr: "meta", attribute: "meta", meta: "meta", variable: "meta",
  property: "meta", comment: "comment", quote: "comment", deletion: "deletion",
};
/** @type {Record<string, Highlight>} */
const painted = {};
/** The ranges of each block, and the time of its next colouring while it grows.
    @type {WeakMap<Element, { ranges: [string, StaticRange][], next: number }>} */
const blocks = new WeakMap();

/** Receives what highlight.js finds as places in the text, and not as HTML. */
export class Places {
  length = 0;
  /** @type {string[]} */
  scopes = [];
  /** @type {Found[]} */
  found = [];

  /** @param {string} text */
  addText(text) {
    const paint = PAINTS[(this.scopes.at(-1) || "").split(".", 1)[0]];
    if (paint && text) this.found.push([this.length, this.length + text.length, paint]);
    this.length += text.length;
  }
  /** @param {string} scope */
  openNode(scope) { this.scopes.push(scope) }
  closeNode() { this.scopes.pop() }
  /** @param {string} scope */
  startScope(scope) { this.openNode(scope) }
  endScope() { this.closeNode() }
  /** highlight.js gives this method its name.
      @param {Places} inner */
  __addSublanguage({ found, length }) {
    for (const [from, to, paint] of found) this.found.push([this.length + from, this.length + to, paint]);
    this.length += length;
  }
  finalize() {}
  toHTML() { return "" }
}

const paints = Boolean(window.CSS && CSS.highlights);
if (paints) {
  hljs.configure({ __emitter: Places });
  for (const name of new Set(Object.values(PAINTS))) CSS.highlights.set(name, painted[name] = new Highlight());
}

/** Return the ranges of places in the text of elements that follow each other.
    @param {Element[]} elements @param {Found[]} places @returns {[string, StaticRange][]} */
function rangesOf(elements, places) {
  /** @type {[Text, number, number][]} */
  const nodes = [];
  let end = 0;
  for (const element of elements) {
    const walker = document.createTreeWalker(element, NodeFilter.SHOW_TEXT);
    for (let node; (node = /** @type {Text | null} */ (walker.nextNode()));) nodes.push([node, end, end += node.length]);
  }
  let first = 0;
  return places.map(([from, to, paint]) => {
    while (nodes[first][2] <= from) first += 1;
    let last = first;
    while (nodes[last][2] < to) last += 1;
    const [startContainer, start] = nodes[first], [endContainer, before] = nodes[last];
    return [paint, new StaticRange({ startContainer, startOffset: from - start, endContainer, endOffset: to - before })];
  });
}

/** Colour a code block by the language that its fence names.
    @param {HTMLElement} block */
export function colour(block) {
  if (!paints) return;
  const began = performance.now(), lines = [...block.children].filter(each => each.matches(".code"));
  const text = lines.map(each => each.textContent).join("");
  const fence = /^\s*[`~]+\s*\{?\.?([^\s{}`]*)/.exec(block.firstChild?.textContent || ""), language = (fence?.[1] || "").toLowerCase();
  for (const [paint, range] of blocks.get(block)?.ranges || []) painted[paint].delete(range);
  const known = hljs.getLanguage(language) && text.length <= MOST_COLOURED;
  const ranges = known ? rangesOf(lines, hljs.highlight(text, { language, ignoreIllegals: true })._emitter.found) : [];
  for (const [paint, range] of ranges) painted[paint].add(range);
  const now = performance.now();
  blocks.set(block, { ranges, next: now + 10 * (now - began) }); // while a block grows, a tenth of the time goes into its colours
}

/** Colour a block that grows, if it is time.
    @param {HTMLElement} block */
export const colourAtTimes = block => performance.now() >= (blocks.get(block)?.next || 0) && colour(block);

const CODE_LINE = /^(\s{2}|\t)|[;{}()[\]:,]$/;
const GUESSED = ["python", "javascript", "typescript", "java", "c", "cpp", "csharp", "go", "rust", "php", "ruby", "bash", "sql", "json", "xml", "css"];

/** Colour text that has no fences, if most of its lines look like code.
    @param {HTMLElement} element */
export function colourGuessed(element) {
  const text = element.textContent || "", lines = text.split("\n").filter(line => line.trim());
  const isCode = text.length <= MOST_COLOURED / 5 && lines.length > 2 // trying all languages takes as long as 16 known blocks
    && lines.filter(line => CODE_LINE.test(line)).length > lines.length / 2;
  blocks.set(element, { ranges: paints && isCode ? rangesOf([element], hljs.highlightAuto(text, GUESSED)._emitter.found) : [], next: 0 });
  paintBlocks();
}

/** Paint what the page shows, and forget the ranges of what it does not show any more. */
export function paintBlocks() {
  for (const name of Object.keys(painted)) painted[name].clear();
  for (const block of document.querySelectorAll(".block, .text")) {
    for (const [paint, range] of blocks.get(block)?.ranges || []) painted[paint].add(range);
  }
}
