"use strict";
// The page loads itself anew; what is ticked stays so in this tab.
const TICKED = "tdpp-compare";
const boxes = [...document.querySelectorAll('input[name="run"]')];
const button = document.getElementById("compare");
const before = new Set(JSON.parse(sessionStorage.getItem(TICKED) || "[]"));

function noted() {
  const ticked = boxes.filter((box) => box.checked).map((box) => box.value);
  sessionStorage.setItem(TICKED, JSON.stringify(ticked));
  if (button) button.disabled = ticked.length < 2;
}

for (const box of boxes) {
  box.checked = before.has(box.value);
  box.addEventListener("change", noted);
}
noted();
