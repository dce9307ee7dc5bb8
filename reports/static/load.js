"use strict";
// Runs the page's other scripts, which lie in it compressed: see page() in reports/figures/page.py.

// What a zlib stream in base64 holds.
function inflated(text) {
  const bytes = Uint8Array.from(atob(text), (character) => character.charCodeAt(0));
  return new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate")));
}

(async () => {
  for (const packed of document.querySelectorAll("script.packed")) {
    const script = document.createElement("script");
    script.textContent = await inflated(packed.textContent).text();
    document.head.append(script);
  }
})().catch((error) => {
  document.body.prepend(`This page needs Chrome 117, Firefox 119, Safari 17.4 or newer: ${error.message}`);
  throw error;
});
