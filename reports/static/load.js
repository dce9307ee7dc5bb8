"use strict";
// Runs the page's other scripts, which lie in it compressed: see page() in reports/page.py.

(async () => {
  for (const packed of document.querySelectorAll("script.packed")) {
    const bytes = Uint8Array.from(atob(packed.textContent), (character) => character.charCodeAt(0));
    const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
    const script = document.createElement("script");
    script.textContent = await new Response(stream).text();
    document.head.append(script);
  }
})().catch((error) => {
  document.body.prepend(`This page needs Chrome 117, Firefox 119, Safari 17.4 or newer: ${error.message}`);
  throw error;
});
