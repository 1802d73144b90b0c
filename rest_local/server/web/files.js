// Files that are attached to a message: text, and images where the model reads them. Chosen, pasted or dropped.

import { $, button, field, make, oneLine, Problem, sizeText } from "./dom.js";
import { report, say, server } from "./server.js";

/** @import { AttachedFile } from "./types.js" */

const MOST_TEXT = 2e6; // bytes of one text file; a context of 128 000 tokens holds about 500 000
const MOST_IMAGE = 30e6;
const WIDEST = 2048; // pixels; models see fewer
/** @type {AttachedFile[]} */
let files = [];

/** Read a file. Throws Problem.
    @param {File} file @returns {Promise<AttachedFile>} */
async function fileRead(file) {
  const name = oneLine(file.name || "pasted image", 120);
  if (file.type.startsWith("image/") && file.type !== "image/svg+xml") return imageRead(file, name);
  if (file.size > MOST_TEXT) throw new Problem(`${name} is not attached: it has ${sizeText(file.size)}, and ${sizeText(MOST_TEXT)} is the limit.`);
  let text = "\0";
  try {
    text = new TextDecoder("utf-8", { fatal: true }).decode(await file.arrayBuffer());
  } catch { /* bytes that are no text */ }
  if (text.includes("\0")) throw new Problem(`${name} is not attached: it is not text in UTF-8.`);
  return { kind: "text", name, text };
}

/** Read an image as a data URL: as it is if it is a PNG or JPEG that is not too large, else drawn anew as a JPEG.
    @param {File} file @param {string} name @returns {Promise<AttachedFile>} */
async function imageRead(file, name) {
  if (!server.vision) throw new Problem(`${name} is not attached: this model does not read images.`);
  if (file.size > MOST_IMAGE) throw new Problem(`${name} is not attached: it has ${sizeText(file.size)}, and ${sizeText(MOST_IMAGE)} is the limit.`);
  const picture = await createImageBitmap(file).catch(() => {
    throw new Problem(`${name} is not attached: the browser cannot read it as an image.`);
  });
  const scale = Math.min(1, WIDEST / Math.max(picture.width, picture.height));
  if (scale === 1 && ["image/png", "image/jpeg"].includes(file.type)) {
    /** @type {string} */
    const url = await new Promise((resolve, reject) => {
      const reader = new FileReader();
      reader.onload = () => resolve(String(reader.result));
      reader.onerror = () => reject(new Problem(`${name} is not attached: it cannot be read.`));
      reader.readAsDataURL(file);
    });
    return { kind: "image", name, url };
  }
  const canvas = make("canvas");
  canvas.width = Math.max(1, Math.round(scale * picture.width));
  canvas.height = Math.max(1, Math.round(scale * picture.height));
  const brush = canvas.getContext("2d");
  if (!brush) throw new Problem(`${name} is not attached: the browser cannot draw it.`);
  brush.fillStyle = "#fff"; // a JPEG has no transparency
  brush.fillRect(0, 0, canvas.width, canvas.height);
  brush.drawImage(picture, 0, 0, canvas.width, canvas.height);
  return { kind: "image", name, url: canvas.toDataURL("image/jpeg", .9) };
}

export const attached = () => files;

/** Replace the files that are attached to the message.
    @param {AttachedFile[]} others */
export function setAttached(others) {
  files = others;
  showAttached();
}

/** @param {File[]} chosen */
async function attach(chosen) {
  say(null);
  for (const file of chosen) {
    try {
      files = [...files, await fileRead(file)];
    } catch (error) {
      report(error);
    }
  }
  showAttached();
}

function showAttached(focus = -1) {
  $("attached").replaceChildren(...files.map((file, place) => {
    const remove = button("Remove", () => {
      files = files.filter(each => each !== file);
      showAttached(place);
    }, `Remove ${file.name}`);
    return make("li", "", chipOf(file), remove);
  }));
  if (focus < 0) return;
  const buttons = $("attached").querySelectorAll("button");
  (buttons.item(Math.min(focus, buttons.length - 1)) || $("attach")).focus();
}

/** Make the element of a file: its name and its size or picture.
    @param {AttachedFile} file */
export function chipOf(file) {
  const chip = make("span", "chip", oneLine(file.name, 60));
  if (file.kind === "text") chip.append(make("span", "small", ` ${sizeText(new Blob([file.text]).size)}`));
  else {
    const picture = make("img");
    picture.src = file.url;
    picture.alt = `Image ${oneLine(file.name, 60)}`;
    chip.prepend(picture);
  }
  return chip;
}

const chooser = field("attach-file");
$("attach").addEventListener("click", () => chooser.click());
chooser.addEventListener("change", () => {
  attach([...chooser.files || []]);
  chooser.value = "";
  $("message").focus();
});
/** Attach the files of an event, if it has any.
    @param {Event} event @param {DataTransfer | null} data */
function attachFrom(event, data) {
  if (!data?.files.length || $("chat").hidden) return;
  event.preventDefault();
  attach([...data.files]);
}
$("message").addEventListener("paste", event => attachFrom(event, event.clipboardData));
document.addEventListener("drop", event => attachFrom(event, event.dataTransfer));
document.addEventListener("dragover", event => {
  if (!$("chat").hidden && event.dataTransfer?.types.includes("Files")) event.preventDefault();
});
