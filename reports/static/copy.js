"use strict";
// The buttons that copy a command: the value of a button, or else the text that stands before it.

const SAID_MS = 2000;

// Shows what a button copies after it, where it is not on the page already; returns the element that holds it.
function shownCommand(button) {
  if (!button.value) return button.previousElementSibling;
  if (!button.nextElementSibling?.matches("pre.command")) {
    button.insertAdjacentElement("afterend", Object.assign(document.createElement("pre"), { className: "command", textContent: button.value }));
  }
  return button.nextElementSibling;
}

// Without the clipboard's interface the text is selected, so that at least the keyboard can copy it.
function copySelected(button) {
  getSelection().selectAllChildren(shownCommand(button));
  return document.execCommand("copy");
}

async function copyCommand(button) {
  const text = button.value || button.previousElementSibling.textContent;
  const done = navigator.clipboard
    ? await navigator.clipboard.writeText(text).then(() => true, () => copySelected(button))
    : copySelected(button);
  button.dataset.said ??= button.textContent;
  button.textContent = done ? "Copied" : /Mac|iP/.test(navigator.platform) ? "Press ⌘C" : "Press Ctrl+C";
  setTimeout(() => (button.textContent = button.dataset.said), SAID_MS);
}

document.addEventListener("click", ({ target }) => {
  const button = target.closest("button.copy");
  if (button) copyCommand(button);
});
