"use strict";
// Whether the page is dark: the reader's system asks for it, now and when it changes, and paper never is.

const darkScheme = matchMedia("(prefers-color-scheme: dark)");
const isDark = () => darkScheme.matches && !document.documentElement.hasAttribute("data-printing");

// What draws listens to these two as well, after this, and so finds the colours of paper.
addEventListener("beforeprint", () => document.documentElement.setAttribute("data-printing", ""));
addEventListener("afterprint", () => document.documentElement.removeAttribute("data-printing"));
