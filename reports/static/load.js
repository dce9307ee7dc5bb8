"use strict";
// Runs the page's other scripts, which lie in it compressed: see page() in reports/figures/page.py.

// What a zlib stream in base64 holds.
function inflated(text) {
  const bytes = Uint8Array.from(atob(text), (character) => character.charCodeAt(0));
  return new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate")));
}

// `load` is when a page is printed from the command line, so it waits until all figures are drawn: a frame whose document
// is open holds it back.
const frame = document.createElement("iframe");
frame.hidden = true;
document.body.append(frame);
frame.contentDocument.open();
const drawings = []; // promises, of the scripts

(async () => {
  for (const packed of document.querySelectorAll("script.packed")) {
    const script = document.createElement("script");
    script.textContent = await inflated(packed.textContent).text();
    document.head.append(script);
  }
  await Promise.allSettled(drawings);
})().catch((error) => {
  document.body.prepend(`This page needs Chrome 117, Firefox 119 or Safari 17.4, or newer: ${error.message}`);
  throw error;
}).finally(() => frame.remove());
