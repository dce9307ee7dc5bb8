"use strict";
// Search in the iteration that is shown: words of a task's name, "rank 3", "stage 1", "mb 5"; Enter goes from one event to
// the next.

const FIELDS = { rank: "rank", r: "rank", stage: "stage", s: "stage", mb: "micro_batch", "micro-batch": "micro_batch", chunk: "chunk" };
let searched = { key: "", found: [], at: -1 };

// What a text asks for: {words, numbers: {rank: 3}}. A number without a word is a rank.
function askedFor(text) {
  const words = text.toLowerCase().replaceAll(/([a-z])[ =:]*(\d+)\b/g, "$1=$2").split(/\s+/).filter(Boolean);
  const asked = { words: [], numbers: {} };
  for (const word of words) {
    const [, name, number] = word.match(/^(?:(.*)=)?(\d+)$/) ?? [];
    const field = number === undefined ? undefined : FIELDS[name ?? "rank"];
    if (field) asked.numbers[field] = Number(number);
    else if (number === undefined) asked.words.push(word);
    else {
      asked.words.push(name);
      asked.numbers.rank = Number(number); // "forward-compute 3"
    }
  }
  return asked;
}

// The events of the iteration that match, by rank, then start.
function matching(text) {
  const { words, numbers } = askedFor(text);
  const whole = run.names.filter((name) => words.includes(name.toLowerCase())); // "optimizer" is no "optimizer-clip-main-grad"
  const named = run.names.map((name) => (whole.length ? whole.includes(name) : words.every((word) => name.toLowerCase().includes(word))));
  const fits = (i) => ["micro_batch", "chunk"].every((key) => numbers[key] === undefined || events[key][i] === numbers[key]);
  const found = [];
  for (const rank of chosenRanks()) {
    if ((numbers.rank ?? rank) !== rank || (numbers.stage ?? run.ranks[rank].stage) !== run.ranks[rank].stage) continue;
    ofRank(rank, (i) => named[events.name[i]] && fits(i) && found.push(i));
  }
  return found;
}

// Selects the next event that matches (by = 1) or the one before (-1), whether its rank is folded or its task hidden or not.
function findNext(by) {
  const text = element("find").value.trim();
  if (!text) return sayFound("");
  const key = JSON.stringify([text, view.iteration, view.stage, view.node, view.dp]);
  if (searched.key !== key) searched = { key, found: matching(text), at: by > 0 ? -1 : 0 };
  const { found } = searched;
  if (!found.length) return sayFound("nothing found in this iteration");
  searched.at = (searched.at + by + found.length) % found.length;
  const i = found[searched.at];
  if (isFolded(events.rank[i])) view.asked.add(events.rank[i]);
  view.hidden.delete(events.name[i]);
  draw();
  chart.draw();
  go(chart, i);
  sayFound(`${(searched.at + 1).toLocaleString("en")} of ${found.length.toLocaleString("en")}`);
}

function sayFound(text) {
  element("found").textContent = text;
}

function makeFind() {
  element("find").addEventListener("keydown", (event) => {
    if (event.key !== "Enter") return;
    event.preventDefault();
    findNext(event.shiftKey ? -1 : 1);
  });
  element("find").addEventListener("input", () => sayFound(""));
  element("find-next").addEventListener("click", () => findNext(1));
}
