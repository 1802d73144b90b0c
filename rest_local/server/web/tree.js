"use strict";
// Conversations as trees of messages: branches, what is sent to a model, files to save and to read. Pure functions.

/** The messages from the first one to `leaf`. `messages`: Map of id -> message. */
function pathTo(messages, leaf) {
  const path = [];
  for (let at = messages.get(leaf); at && !path.includes(at); at = messages.get(at.parent)) path.unshift(at);
  return path;
}

const childrenOf = (messages, parent) =>
  [...messages.values()].filter(each => each.parent === parent).sort((one, other) => one.created - other.created);

/** The end of the newest branch below a message, or of the newest conversation for null. */
function newestBelow(messages, id) {
  for (let below; (below = childrenOf(messages, id)).length;) id = below.at(-1).id;
  return id;
}

// ---- What a model gets -------------------------------------------------------------------------------------------

/** Text between fences that it does not contain. */
function fenced(text, info) {
  const longest = Math.max(2, ...[...text.matchAll(/`+/g)].map(found => found[0].length));
  const ticks = "`".repeat(longest + 1);
  return `${ticks}${info}\n${text}${text.endsWith("\n") ? "" : "\n"}${ticks}`;
}

/** The text of a message: attached files with their names first. */
function textOf(message) {
  const files = (message.files || []).filter(file => file.kind === "text");
  const parts = files.map(file => `${file.name}:\n${fenced(file.text, /\.(\w{1,12})$/.exec(file.name)?.[1] || "")}\n`);
  return [...parts, ...(message.content || !parts.length ? [message.content] : [])].join("\n");
}

function sentMessages(path, system) {
  const messages = path.map(message => {
    const text = textOf(message), images = (message.files || []).filter(file => file.kind === "image");
    const parts = images.map(image => ({ type: "image_url", image_url: { url: image.url } }));
    return { role: message.role, content: images.length ? [...parts, { type: "text", text }] : text };
  });
  return system.trim() ? [{ role: "system", content: system }, ...messages] : messages;
}

// ---- Files -------------------------------------------------------------------------------------------------------

function asMarkdown(row, path) {
  const parts = [`# ${oneLine(row.title, 200)}`];
  if (row.system) parts.push(`**System prompt**\n\n${row.system}`);
  for (const message of path) {
    const images = (message.files || []).filter(file => file.kind === "image");
    parts.push(message.role === "user" ? "## You" : `## ${message.model ? oneLine(message.model, 100) : "Model"}`);
    parts.push(...images.map(image => `![${oneLine(image.name, 100).replace(/[[\]]/g, "")}](${image.url})`), textOf(message));
  }
  return `${parts.join("\n\n").trimEnd()}\n`;
}

const FORMAT = "rest-local conversations";

/** `conversations`: [{ row, messages }]. */
function asJson(conversations) {
  const each = ({ row, messages }) => ({ ...row, messages: messages.map(({ conversation, ...fields }) => fields) });
  return JSON.stringify({ format: FORMAT, version: 1, conversations: conversations.map(each) }, null, 1);
}

const fileName = (title, end) =>
  `${title.normalize("NFC").replace(/[^\p{L}\p{N}]+/gu, "-").replace(/^-|-$/g, "").slice(0, 60) || "conversation"}.${end}`;

/** Conversations of a file, checked and with new names, so that nothing that is here is replaced. Throws Problem. */
function fromJson(text, name) {
  let data;
  try {
    data = JSON.parse(text);
  } catch {
    throw new Problem(`${name} cannot be imported: it is not JSON.`);
  }
  if (!data || data.format !== FORMAT || !Array.isArray(data.conversations)) {
    throw new Problem(`${name} cannot be imported: it holds no conversations that this page has saved.`);
  }
  if (data.version !== 1) throw new Problem(`${name} cannot be imported: it was saved by a newer version of this page.`);
  return data.conversations.map((each, place) => imported(each, `${name}, conversation ${place + 1}`));
}

const isText = value => typeof value === "string";
const isTime = value => Number.isFinite(value) && value > 0 && value < 8e15;

function imported(given, where) {
  const wrong = what => new Problem(`${where} cannot be imported: ${what}.`);
  if (!given || !isText(given.title) || !Array.isArray(given.messages)) throw wrong("it has no title or no messages");
  const id = newId(), names = new Map();
  for (const message of given.messages) {
    if (!message || !isText(message.id) || names.has(message.id)) throw wrong("a message has no name of its own");
    if (!["user", "assistant"].includes(message.role) || !isText(message.content)) {
      throw wrong("a message has no role or no content");
    }
    names.set(message.id, newId());
  }
  const messages = given.messages.map(message => {
    const parent = message.parent === null || message.parent === undefined ? null : names.get(message.parent);
    if (parent === undefined) throw wrong("a message answers one that is not in the file");
    return {
      id: names.get(message.id), conversation: id, parent, role: message.role, content: message.content,
      created: isTime(message.created) ? message.created : now(),
      ...(message.role === "user" ? { files: importedFiles(message.files, wrong) } : importedAnswer(message)),
    };
  });
  const reached = new Set(), byParent = Map.groupBy ? Map.groupBy(messages, each => each.parent) : grouped(messages);
  for (let next = [null]; next.length;) {
    const below = byParent.get(next.pop()) || [];
    for (const each of below) { reached.add(each); next.push(each.id) }
  }
  if (reached.size < messages.length) throw wrong("messages answer each other in a circle");
  const tree = new Map(messages.map(each => [each.id, each]));
  const row = {
    id, title: given.title.slice(0, 1000), system: isText(given.system) ? given.system : "",
    created: isTime(given.created) ? given.created : now(), changed: isTime(given.changed) ? given.changed : now(),
    leaf: names.get(given.leaf) || newestBelow(tree, null),
  };
  return { row, messages };
}

function grouped(messages) {
  const groups = new Map();
  for (const each of messages) groups.set(each.parent, [...(groups.get(each.parent) || []), each]);
  return groups;
}

const IMAGE = /^data:image\/(png|jpeg|gif|bmp|webp);base64,[A-Za-z0-9+/]+={0,2}$/;

function importedFiles(files, wrong) {
  if (files === undefined || files === null) return [];
  if (!Array.isArray(files)) throw wrong("its files are no list");
  return files.map(file => {
    if (file && isText(file.name) && file.kind === "text" && isText(file.text)) return { kind: "text", name: file.name, text: file.text };
    if (file && isText(file.name) && file.kind === "image" && isText(file.url) && IMAGE.test(file.url)) {
      return { kind: "image", name: file.name, url: file.url };
    }
    throw wrong("a file is neither text nor an image");
  });
}

function importedAnswer({ thought, reason, model, asked, timings, steps }) {
  const numbers = timings && ["predicted_n", "predicted_per_second"].every(name => Number.isFinite(timings[name]));
  const counts = ["predicted_n", "predicted_per_second", "draft_n", "draft_n_accepted"];
  const isToken = token => token && isText(token.text) && isText(token.source)
    && (token.file === undefined || isText(token.file))
    && ["line", "match", "probability"].every(name => token[name] === undefined || Number.isFinite(token[name]));
  const whole = Array.isArray(steps) && steps.every(step => Array.isArray(step) && step.every(isToken));
  return {
    thought: isText(thought) ? thought : "", reason: isText(reason) ? reason.slice(0, 40) : null,
    model: isText(model) ? model : "", draft: null, steps: whole ? steps : null,
    asked: asked && Number.isFinite(asked.seed) ? { ...(Number.isFinite(asked.temperature) && { temperature: asked.temperature }), seed: asked.seed } : {},
    timings: numbers ? Object.fromEntries(counts.map(name => [name, Number.isFinite(timings[name]) ? timings[name] : 0])) : null,
  };
}
