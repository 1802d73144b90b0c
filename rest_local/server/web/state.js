// What several modules read and change: the open conversation, the answer that is written, the one that is shown.

import { newConversation } from "./store.js";

/** @import { Answer } from "./answer.js" */
/** @import { Conversation, Place } from "./types.js" */

/**
 * @type {{
 *   talk: Conversation,
 *   running: { answer: Answer, talk: Conversation | null, abort: () => void } | null,
 *   shown: Answer | null,
 *   marked: Place | null,
 *   followed: { log: HTMLElement, answer: Answer, top: number } | null,
 * }}
 */
export const state = {
  talk: newConversation(),
  running: null, // the request that is under way
  shown: null, // the answer whose figures are shown
  marked: null, // the step under the pointer or the focus
  followed: null, // the growing answer, and how far the page was scrolled
};
