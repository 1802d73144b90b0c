// Conversations in the browser's IndexedDB. Knows nothing of how they are shown.
//
// A conversation is { row, messages }. Its row is { id, title, system, created, changed }. Each message is a row of its
// own, { id, conversation, role, content, created, ... }, and messages follow each other in the order of `created`.
//
// Conversations that cannot be stored (a private window, a full disk) stay in memory and are tried again with the next
// write. The store sends the event "change" when the list of conversations is out of date.

/** @import { Conversation, Message, Row } from "./types.js" */

const DATABASE = "rest-local", VERSION = 1;

/** `randomUUID` is missing where the page came over plain HTTP from another machine. */
export const newId = () => [...crypto.getRandomValues(new Uint8Array(12))].map(each => each.toString(16).padStart(2, "0")).join("");

let latest = 0;
/** Return the time in milliseconds, later than each time before, so that it orders messages. */
export const now = () => latest = Math.max(latest + 1, Date.now());

/** @returns {Conversation} */
export const newConversation = () =>
  ({ row: { id: newId(), title: "", system: "", created: now(), changed: now() }, messages: [] });

/** @template T @param {IDBRequest<T>} request @returns {Promise<T>} */
const settled = request => new Promise((resolve, reject) => {
  request.onsuccess = () => resolve(request.result);
  request.onerror = () => reject(request.error);
});

/** @param {IDBTransaction} transaction @returns {Promise<void>} */
const completed = transaction => new Promise((resolve, reject) => {
  transaction.oncomplete = () => resolve();
  transaction.onabort = () => reject(transaction.error || new DOMException("aborted", "AbortError"));
});

class Store extends EventTarget {
  constructor() {
    super();
    /** @type {Map<string, Conversation>} */
    this.unsaved = new Map(); // id -> a conversation that could not be stored; the database may lack any part of it
    this.problem = ""; // why nothing is stored
    /** @type {IDBDatabase | null} */
    this.db = null;
    this.opened = this.open();
  }

  async open() {
    try {
      const request = indexedDB.open(DATABASE, VERSION);
      request.onupgradeneeded = () => {
        request.result.createObjectStore("conversations", { keyPath: "id" });
        request.result.createObjectStore("messages", { keyPath: "id" }).createIndex("conversation", "conversation");
      };
      const db = this.db = await settled(request);
      db.onversionchange = () => db.close(); // a newer page in another tab
    } catch (error) {
      this.fail(error);
    }
  }

  /** @param {unknown} error */
  fail(error) {
    this.problem = error instanceof DOMException && error.name === "QuotaExceededError"
      ? "The browser's storage is full. This conversation goes on, but it is lost when this tab is closed. Delete older conversations to make room."
      : "This browser stores nothing for this page, because the window is private or its settings forbid it. Conversations are lost when this tab is closed.";
    this.changed();
  }

  changed() { this.dispatchEvent(new Event("change")) }

  /** Return the result of `work(conversations, messages)` in one transaction, or throw what fails.
      @template T
      @param {IDBTransactionMode} mode
      @param {(conversations: IDBObjectStore, messages: IDBObjectStore) => T | Promise<T>} work */
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

  /** Return the rows of all conversations, the newest first. */
  async list() {
    /** @type {Row[]} */
    const rows = await this.transact("readonly", conversations => settled(conversations.getAll())).catch(() => []);
    const known = new Map(rows.map(row => [row.id, row]));
    for (const [id, { row }] of this.unsaved) known.set(id, row);
    return [...known.values()].sort((one, other) => other.changed - one.changed);
  }

  /** Return a conversation, or null if another tab has deleted it.
      @param {string} id @returns {Promise<Conversation | null>} */
  async load(id) {
    const stored = await this.transact("readonly", async (conversations, messages) => {
      const [row, all] = [settled(conversations.get(id)), settled(messages.index("conversation").getAll(id))];
      /** @type {Message[]} */
      const kept = await all;
      return { row: await row, messages: kept.sort((one, other) => one.created - other.created) };
    }).catch(() => null);
    return this.unsaved.get(id) || (stored && stored.row ? stored : null);
  }

  /** Store the row of a conversation and the messages `written` of it, and delete those whose ids are `removed`.
      @param {Conversation} conversation @param {Message[]} written @param {string[]} removed */
  async save(conversation, written, removed = []) {
    const wholes = [...this.unsaved.values()];
    try {
      await this.transact("readwrite", async (conversations, messages) => {
        for (const each of wholes) {
          for (const key of await settled(messages.index("conversation").getAllKeys(each.row.id))) messages.delete(key);
          for (const message of each.messages) messages.put(message);
          conversations.put(each.row);
        }
        conversations.put(conversation.row);
        for (const message of written) messages.put(message);
        for (const each of removed) messages.delete(each);
      });
    } catch (error) {
      this.unsaved.set(conversation.row.id, conversation);
      this.fail(error);
      return;
    }
    for (const each of wholes) this.unsaved.delete(each.row.id);
    this.problem = "";
    this.changed();
  }

  /** Delete conversations.
      @param {string[]} ids */
  async remove(ids) {
    for (const id of ids) this.unsaved.delete(id);
    await this.transact("readwrite", async (conversations, messages) => {
      for (const id of ids) {
        conversations.delete(id);
        for (const key of await settled(messages.index("conversation").getAllKeys(id))) messages.delete(key);
      }
    }).catch(() => {});
    this.changed();
  }
}

export const store = new Store();
