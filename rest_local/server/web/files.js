"use strict";
// Files that are attached to a message: text, and images where the model reads them. Chosen, pasted or dropped.

const MOST_TEXT = 2e6; // bytes of one text file; a context of 128 000 tokens holds about 500 000
const MOST_IMAGE = 30e6;
const WIDEST = 2048; // pixels; models see fewer
let attached = []; // { kind: "text", name, text } or { kind: "image", name, url }

/** An attached file. Throws Problem. */
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

/** An image as a data URL: as it is if it is a PNG or JPEG that is not too large, else drawn anew as a JPEG. */
async function imageRead(file, name) {
  if (!server.vision) throw new Problem(`${name} is not attached: this model does not read images.`);
  if (file.size > MOST_IMAGE) throw new Problem(`${name} is not attached: it has ${sizeText(file.size)}, and ${sizeText(MOST_IMAGE)} is the limit.`);
  const picture = await createImageBitmap(file).catch(() => {
    throw new Problem(`${name} is not attached: the browser cannot read it as an image.`);
  });
  const scale = Math.min(1, WIDEST / Math.max(picture.width, picture.height));
  if (scale === 1 && ["image/png", "image/jpeg"].includes(file.type)) {
    const url = await new Promise((resolve, reject) => {
      const reader = new FileReader();
      reader.onload = () => resolve(reader.result);
      reader.onerror = () => reject(new Problem(`${name} is not attached: it cannot be read.`));
      reader.readAsDataURL(file);
    });
    return { kind: "image", name, url };
  }
  const canvas = make("canvas");
  canvas.width = Math.max(1, Math.round(scale * picture.width));
  canvas.height = Math.max(1, Math.round(scale * picture.height));
  const brush = canvas.getContext("2d");
  brush.fillStyle = "#fff"; // a JPEG has no transparency
  brush.fillRect(0, 0, canvas.width, canvas.height);
  brush.drawImage(picture, 0, 0, canvas.width, canvas.height);
  return { kind: "image", name, url: canvas.toDataURL("image/jpeg", .9) };
}

async function attach(files) {
  say(null);
  for (const file of files) {
    try {
      attached.push(await fileRead(file));
    } catch (problem) {
      say(problem);
    }
  }
  showAttached();
}

function showAttached(focus = -1) {
  $("attached").replaceChildren(...attached.map((file, place) => {
    const remove = button("Remove", () => {
      attached.splice(place, 1);
      showAttached(place);
    }, `Remove ${file.name}`);
    return make("li", "", chipOf(file), remove);
  }));
  if (focus < 0) return;
  const buttons = $("attached").querySelectorAll("button");
  (buttons[Math.min(focus, buttons.length - 1)] || $("attach")).focus();
}

/** A file in a word: its name and size, and of an image the picture. */
function chipOf(file) {
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

$("attach").addEventListener("click", () => $("attach-file").click());
$("attach-file").addEventListener("change", () => {
  attach([...$("attach-file").files]);
  $("attach-file").value = "";
  $("message").focus();
});
$("message").addEventListener("paste", event => {
  if (!event.clipboardData.files.length) return;
  event.preventDefault();
  attach([...event.clipboardData.files]);
});
const dropped = event => !$("chat").hidden && event.dataTransfer.types.includes("Files");
document.addEventListener("dragover", event => { if (dropped(event)) event.preventDefault() });
document.addEventListener("drop", event => {
  if (!dropped(event)) return;
  event.preventDefault();
  attach([...event.dataTransfer.files]);
});
