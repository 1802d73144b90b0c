"use strict";
// Conversations in the browser's IndexedDB, and the news of other tabs. Knows nothing of how they are shown.
//
// A conversation is a row { id, title, system, leaf, created, changed }; each of its messages is a row of its own
// { id, conversation, parent, role, content, created, ... } that only the tab which wrote it writes again. So two tabs
// that write to one conversation add to it, and neither deletes what the other wrote. The last one to write decides about
// the title and the branch that is shown first.
//
// What cannot be stored (a private window, a full disk) is kept in memory and tried again with the next write.

const DATABASE = "rest-local", VERSION = 1;

/** A name that no other tab takes. (`randomUUID` is missing where the page came over plain HTTP from another machine.) */
const newId = () => [...crypto.getRandomValues(new Uint8Array(12))].map(each => each.toString(16).padStart(2, "0")).join("");

let latest = 0;
/** The time in milliseconds; later than each before, so that it orders messages. */
const now = () => latest = Math.max(latest + 1, Date.now());

const settled = request => new Promise((resolve, reject) => {
  request.onsuccess = () => resolve(request.result);
  request.onerror = () => reject(request.error);
});

const completed = transaction => new Promise((resolve, reject) => {
  transaction.oncomplete = () => resolve();
  transaction.onabort = () => reject(transaction.error || new DOMException("aborted", "AbortError"));
});

class Store {
  /** `changed(ids, gone)`: another tab wrote these conversations, or deleted them. `failed(text)`: nothing is stored for
      this reason; null when it works again. */
  constructor(changed, failed) {
    this.unsaved = { conversations: new Map(), messages: new Map() }; // rows on their way, or that could not be stored
    this.failed = failed;
    this.problem = null;
    try {
      this.channel = new BroadcastChannel(DATABASE);
      this.channel.onmessage = ({ data }) => changed(data.ids, data.gone);
    } catch { /* other tabs are not told */ }
    this.opened = this.open();
  }

  async open() {
    try {
      const request = indexedDB.open(DATABASE, VERSION);
      request.onupgradeneeded = () => {
        request.result.createObjectStore("conversations", { keyPath: "id" });
        request.result.createObjectStore("messages", { keyPath: "id" }).createIndex("conversation", "conversation");
      };
      this.db = await settled(request);
      this.db.onversionchange = () => this.db.close(); // a newer page in another tab
    } catch (error) {
      this.fail(error);
    }
  }

  fail(error) {
    const full = error && error.name === "QuotaExceededError";
    this.problem = full
      ? "The browser's storage is full: this conversation goes on, but is lost when this tab is closed. Delete older ones, or save it as a file."
      : "This browser stores nothing for this page (a private window, or its settings): conversations are lost when this tab is closed. Save them as files.";
    this.failed(this.problem);
  }

  tell(ids, gone = false) {
    if (this.channel) this.channel.postMessage({ ids, gone });
  }

  /** The result of `work(conversations, messages)` in one transaction. Throws what fails. */
  async transact(mode, work) {
    await this.opened;
    if (!this.db) throw new DOMException("no storage", "InvalidStateError");
    const transaction = this.db.transaction(["conversations", "messages"], mode);
    const done = completed(transaction);
    done.catch(() => {}); // it is awaited below
    const result = await work(transaction.objectStore("conversations"), transaction.objectStore("messages"));
    await done;
    return result;
  }

  /** All conversations, the newest first. */
  async list() {
    const rows = await this.transact("readonly", conversations => settled(conversations.getAll())).catch(() => []);
    const known = new Map(rows.map(row => [row.id, row]));
    for (const [id, row] of this.unsaved.conversations) known.set(id, { ...known.get(id), ...row });
    return [...known.values()].sort((one, other) => other.changed - one.changed);
  }

  async messages(id) {
    const rows = await this.transact("readonly", (_, messages) => settled(messages.index("conversation").getAll(id))).catch(() => []);
    const known = new Map(rows.map(row => [row.id, row]));
    for (const row of this.unsaved.messages.values()) if (row.conversation === id) known.set(row.id, row);
    return [...known.values()];
  }

  /** The first message of each conversation whose text holds `wanted` (in lower case): Map of its id -> the message. */
  async search(wanted) {
    const found = new Map();
    const see = row => {
      const known = found.get(row.conversation);
      if ((!known || row.created < known.created) && textOf(row).toLowerCase().includes(wanted)) found.set(row.conversation, row);
    };
    await this.transact("readonly", (_, messages) => new Promise((resolve, reject) => {
      const request = messages.openCursor(); // one at a time: images and tokens of all of them are large
      request.onerror = () => reject(request.error);
      request.onsuccess = () => {
        if (!request.result) return resolve();
        see(request.result.value);
        request.result.continue();
      };
    })).catch(() => {});
    this.unsaved.messages.forEach(see);
    return found;
  }

  /** Stores fields of a conversation and messages of it. `whole`: { row, messages }, the conversation as this tab knows
      it, for the case that another tab has deleted it meanwhile: what is still written to is not lost. */
  async save(id, fields, messages = [], whole = { row: {}, messages }) {
    const { unsaved } = this;
    unsaved.conversations.set(id, { ...unsaved.conversations.get(id), id, ...fields });
    for (const row of messages) unsaved.messages.set(row.id, row);
    const rows = [...unsaved.conversations.values()], written = [...unsaved.messages.values()];
    try {
      await this.transact("readwrite", async (conversations, stored) => {
        for (const row of rows) {
          const known = await settled(conversations.get(row.id));
          const back = known || row.id !== id ? { row: {}, messages: [] } : whole;
          for (const message of back.messages) stored.put(message);
          conversations.put({ title: "", system: "", leaf: null, created: now(), changed: now(), ...known, ...back.row, ...row });
        }
        for (const message of written) stored.put(message);
      });
    } catch (error) {
      this.fail(error);
      return;
    }
    for (const row of rows) if (unsaved.conversations.get(row.id) === row) unsaved.conversations.delete(row.id);
    for (const row of written) if (unsaved.messages.get(row.id) === row) unsaved.messages.delete(row.id);
    if (this.problem) this.failed(this.problem = null);
    this.tell(rows.map(row => row.id));
  }

  /** Deletes messages of a conversation that were never answered. */
  async forget(id, ids) {
    for (const each of ids) this.unsaved.messages.delete(each);
    await this.transact("readwrite", (_, messages) => { for (const each of ids) messages.delete(each) }).catch(() => {});
    this.tell([id]);
  }

  /** Deletes conversations. Returns them with their messages, for `restore`. */
  async remove(ids) {
    const removed = [];
    for (const row of (await this.list()).filter(each => ids.includes(each.id))) {
      removed.push({ row, messages: await this.messages(row.id) });
    }
    for (const id of ids) this.unsaved.conversations.delete(id);
    for (const [id, row] of this.unsaved.messages) if (ids.includes(row.conversation)) this.unsaved.messages.delete(id);
    await this.transact("readwrite", async (conversations, messages) => {
      for (const id of ids) {
        conversations.delete(id);
        for (const key of await settled(messages.index("conversation").getAllKeys(id))) messages.delete(key);
      }
    }).catch(() => {});
    this.tell(ids, true);
    return removed;
  }

  /** Stores conversations as they are. */
  async restore(conversations) {
    for (const { row, messages } of conversations) await this.save(row.id, row, messages);
  }
}
