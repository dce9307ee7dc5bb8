"use strict";
// Runs the page's other scripts, which lie in it compressed: see page() in reports/page.py.

(async () => {
  const packed = atob(document.getElementById("scripts").textContent);
  const bytes = Uint8Array.from(packed, (character) => character.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
  for (const code of JSON.parse(await new Response(stream).text())) {
    const script = document.createElement("script");
    script.textContent = code;
    document.head.append(script);
  }
})().catch((error) => {
  document.body.prepend(`This page needs Chrome 117, Firefox 119, Safari 17.4 or newer: ${error.message}`);
  throw error;
});
