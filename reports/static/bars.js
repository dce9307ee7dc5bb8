"use strict";
// Bars of a timeline, before they are drawn: {i, row, start, end, wait, count, lasts}, with the index of an event, a row,
// times in ns, and what several events last together.

const element = (id) => document.getElementById(id);
const clamp = (value, least, most) => Math.min(Math.max(value, least), most);
const digits = (value, count) => value.toLocaleString("en", { minimumFractionDigits: count, maximumFractionDigits: count });
const ms = (ns) => digits(ns / 1e6, 3);

// Neighbours of a row and a name that are shorter than `gap` ns, and less than that apart, become one bar with their count.
function merged(bars, gap, names) {
  const last = new Map();
  const result = [];
  for (const bar of bars) {
    const short = bar.end - bar.start < gap;
    const key = (bar.row * 1024 + names[bar.i]) * 2 + (bar.beside ? 1 : 0);
    const before = last.get(key);
    if (before && short && before.short && bar.start - before.end < gap) {
      before.lasts = (before.lasts ?? before.end - before.start) + bar.end - bar.start;
      before.end = Math.max(before.end, bar.end);
      before.count += bar.count;
    } else {
      const copy = { ...bar, short };
      last.set(key, copy);
      result.push(copy);
    }
  }
  return result;
}
