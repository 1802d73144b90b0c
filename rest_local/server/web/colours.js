"use strict";
// Colours of code. highlight.js reads the text, and the browser paints ranges of it (CSS custom highlights): the document
// stays as it is, and no text becomes markup. Browsers without custom highlights show code in one colour.

const MOST_COLOURED = 50_000; // characters of a block
const PAINTS = { // the first word of a scope of highlight.js -> the name in the style sheet
  keyword: "keyword", tag: "keyword", name: "keyword", "selector-tag": "keyword", section: "title", title: "title",
  built_in: "type", type: "type", class: "type", string: "string", regexp: "string", char: "string", addition: "string",
  number: "number", literal: "number", symbol: "number", attr: "meta", attribute: "meta", meta: "meta", variable: "meta",
  property: "meta", comment: "comment", quote: "comment", deletion: "deletion",
};
const painted = {}; // name -> its Highlight

/** Takes what highlight.js finds as places in the text: [from, to, paint], in the place of its HTML. */
class Places {
  constructor() { Object.assign(this, { length: 0, scopes: [], found: [] }) }
  addText(text) {
    const paint = PAINTS[(this.scopes.at(-1) || "").split(".", 1)[0]];
    if (paint && text) this.found.push([this.length, this.length + text.length, paint]);
    this.length += text.length;
  }
  openNode(scope) { this.scopes.push(scope) }
  closeNode() { this.scopes.pop() }
  startScope(scope) { this.openNode(scope) }
  endScope() { this.closeNode() }
  __addSublanguage({ found, length }) { // its name, from highlight.js
    this.found.push(...found.map(([from, to, paint]) => [this.length + from, this.length + to, paint]));
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

/** The ranges of places in the text of elements, which follow each other. */
function rangesOf(elements, places) {
  const nodes = [];
  let end = 0;
  for (const element of elements) {
    const walker = document.createTreeWalker(element, NodeFilter.SHOW_TEXT);
    for (let node; (node = walker.nextNode());) nodes.push([node, end, end += node.length]);
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

/** Colours a code block by the language that its fence names. */
function colour(block) {
  if (!paints) return;
  const began = performance.now(), lines = [...block.children].filter(each => each.matches(".code"));
  const text = lines.map(each => each.textContent).join("");
  const language = /^\s*[`~]+\s*\{?\.?([^\s{}`]*)/.exec(block.firstChild.textContent)[1].toLowerCase();
  for (const [paint, range] of block.ranges || []) painted[paint].delete(range);
  block.ranges = [];
  if (hljs.getLanguage(language) && text.length <= MOST_COLOURED) {
    const { found } = hljs.highlight(text, { language, ignoreIllegals: true })._emitter;
    block.ranges = rangesOf(lines, found);
  }
  for (const [paint, range] of block.ranges) painted[paint].add(range);
  const now = performance.now();
  block.next = now + 10 * (now - began); // while a block grows, a tenth of the time goes into its colours
}

const CODE_LINE = /^(\s{2}|\t)|[;{}()[\]:,]$/;
const GUESSED = ["python", "javascript", "typescript", "java", "c", "cpp", "csharp", "go", "rust", "php", "ruby", "bash", "sql", "json", "xml", "css"];

/** Colours text that has no fences, if most of its lines look like code. */
function colourGuessed(element) {
  const text = element.textContent, lines = text.split("\n").filter(line => line.trim());
  const isCode = text.length <= MOST_COLOURED / 5 && lines.length > 2
    && lines.filter(line => CODE_LINE.test(line)).length > lines.length / 2; // each language costs as much as one that is known
  element.ranges = paints && isCode ? rangesOf([element], hljs.highlightAuto(text, GUESSED)._emitter.found) : [];
  paintBlocks();
}

const colourAtTimes = block => performance.now() >= (block.next || 0) && colour(block);

/** Paints what the page shows, and forgets ranges of what it does not show any more. */
function paintBlocks() {
  for (const name of Object.keys(painted)) painted[name].clear();
  if (!paints) return;
  for (const block of document.querySelectorAll(".block, .text")) for (const [paint, range] of block.ranges || []) painted[paint].add(range);
}
