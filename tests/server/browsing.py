"""Helpers for tests of the page in a real browser."""

import json
from collections.abc import Callable
from typing import Any

Open = Callable[..., Any]


FRESH = "?fresh"
FORGET = """if (location.search === "?fresh") {
  localStorage.clear();
  sessionStorage.clear();
  indexedDB.deleteDatabase("rest-local");
  history.replaceState(null, "", "/");
}"""


class Tabs:
    """Tabs of one profile, of which the first stays open: its process is most of what a test costs. It forgets all that
    was stored where it opens a page with FRESH, before the page's scripts."""

    def __init__(self, browser: Any) -> None:
        self.context = browser.new_context(permissions=["clipboard-read", "clipboard-write"])
        self.first: Any = None

    def new(self, *, same_browser: bool) -> Any:
        if same_browser:
            return self.context.new_page()
        if self.first is None or self.first.is_closed():
            self.first = self.context.new_page()
            self.first.add_init_script(FORGET)
        return self.first


DONE = """() => [...document.querySelectorAll("#spoken p")].at(-1)?.textContent === "Done"
  && document.getElementById("status").textContent === "" """


def done(page: Any) -> None:
    """Wait until an answer has ended by itself. `expect` would look only ten times a second."""
    page.wait_for_function(DONE)


def answered(page: Any, chunks: list[dict[str, Any]]) -> None:
    """Answer every chat request of the page with these events."""
    lines = [json.dumps(each) for each in (*chunks, chunk({}, "stop"))]
    body = "".join(f"data: {line}\n\n" for line in (*lines, "[DONE]"))
    page.route("**/v1/chat/completions", lambda route: route.fulfill(content_type="text/event-stream", body=body))


def chunk(delta: dict[str, Any], finish_reason: str | None = None, **more: Any) -> dict[str, Any]:
    """Return an event of a chat."""
    return {"choices": [{"index": 0, "delta": delta, "finish_reason": finish_reason}], **more}


def token(text: str, source: str = "datastore", **more: Any) -> dict[str, Any]:
    """Return a token of `rest_local.tokens`."""
    return {
        "text": text, "token": 1, "source": source, "file": "a.py", "line": 1, "match": 2, "probability": 0.5,
    } | more  # fmt: skip


def ask(page: Any, text: str) -> None:
    """Write a message and send it with the keyboard; the message field has the focus."""
    assert page.evaluate("document.activeElement.id") == "message"
    page.keyboard.insert_text(text)
    page.keyboard.press("Enter")


FAULTS = """() => {
  const faults = [], seen = new Set(), visible = each => each.getClientRects().length > 0;
  const known = ids => (ids || "").split(" ").filter(Boolean).every(id => document.getElementById(id));
  if (!document.documentElement.lang || !document.title) faults.push("no language or title");
  for (const each of document.querySelectorAll("[id]")) {
    if (seen.has(each.id)) faults.push(`id twice: ${each.id}`);
    seen.add(each.id);
  }
  for (const each of document.querySelectorAll("input, select, textarea")) {
    const label = each.labels.length ? each.labels[0].textContent : each.getAttribute("aria-label");
    if (!(label || "").trim()) faults.push(`no label: ${each.id}`);
  }
  for (const each of document.querySelectorAll("button, [role=tab], summary, h1, h2, legend")) {
    const name = each.getAttribute("aria-label") || each.textContent;
    if (!name.trim()) faults.push(`no name: ${each.outerHTML.slice(0, 60)}`);
  }
  for (const each of document.querySelectorAll("canvas, [role=log], [role=tablist], aside, .text")) {
    const named = each.getAttribute("aria-label")
      || each.getAttribute("aria-labelledby") && known(each.getAttribute("aria-labelledby"));
    if (!named || each.matches("canvas:not([role=img])")) faults.push(`no name: ${each.outerHTML.slice(0, 60)}`);
  }
  for (const each of document.querySelectorAll("[aria-controls], [aria-labelledby], [aria-describedby]")) {
    for (const name of ["aria-controls", "aria-labelledby", "aria-describedby"]) {
      if (!known(each.getAttribute(name))) faults.push(`${name} leads nowhere: ${each.outerHTML.slice(0, 60)}`);
    }
  }
  for (const each of document.querySelectorAll("[tabindex]")) if (each.tabIndex > 0) faults.push("a positive tabindex");
  const brush = new OffscreenCanvas(1, 1).getContext("2d", { willReadFrequently: true });
  const painted = new Map();
  const paint = colours => {
    const key = colours.join();
    if (painted.has(key)) return painted.get(key);
    for (const colour of ["#fff", ...colours]) { brush.fillStyle = colour; brush.fillRect(0, 0, 1, 1) }
    const [r, g, b] = [...brush.getImageData(0, 0, 1, 1).data].map(v => v / 255)
      .map(v => v <= .04045 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4);
    painted.set(key, .2126 * r + .7152 * g + .0722 * b);
    return painted.get(key);
  };
  for (const each of document.querySelectorAll("body *")) {
    const speaks = [...each.childNodes].some(node => node.nodeType === 3 && node.data.trim());
    if (!speaks || !visible(each) || each.disabled || each.matches("option, script")) continue;
    const layers = [];
    for (let up = each; up; up = up.parentElement) layers.unshift(getComputedStyle(up).backgroundColor);
    const under = paint(layers), ink = paint([...layers, getComputedStyle(each).color]);
    const contrast = (Math.max(ink, under) + .05) / (Math.min(ink, under) + .05);
    if (contrast < 4.5) faults.push(`contrast ${contrast.toFixed(1)}: ${each.outerHTML.slice(0, 60)}`);
  }
  return faults;
}"""
