"use strict";
// Whether the reader's system asks for dark colours, now and when it changes.

const darkScheme = matchMedia("(prefers-color-scheme: dark)");
