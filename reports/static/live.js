"use strict";
// A page that follows its run: it asks the server that it comes from what has changed, and puts that in its place, until
// the run is over. A part that stays the same is not touched, nor is what the reader chose in the course.

const LONGEST_S = 60; // between two questions while the server does not answer
const ANSWER_S = 120; // that an answer may take
const live = { ...JSON.parse(document.getElementById("live-data").textContent), failures: 0, waiting: null, asking: false, ended: false };
const clock = (unix) => new Date(1000 * unix).toLocaleTimeString();

function say(state, words) {
  const box = document.getElementById("live");
  box.className = state;
  box.querySelector("b").textContent = { "": "Live", lost: "Not live", over: "Over" }[state];
  document.getElementById("live-time").textContent = `as of ${clock(live.unix)}.`;
  const said = document.getElementById("live-said");
  if (said.textContent !== words) said.textContent = words; // what is the same is not read out again
}

// Puts the parts in place; those that the page has already stay as they are, or move.
async function put(parts) {
  const main = document.querySelector("main");
  const had = new Map([...main.querySelectorAll(":scope > [data-part]")].map((one) => [one.dataset.part, one]));
  const gone = new Set(had.values());
  const shown = parts.map(({ digest, html }) => {
    const place = had.get(digest) ?? Object.assign(document.createElement("div"), { innerHTML: html });
    place.dataset.part = digest;
    gone.delete(place);
    return place;
  });
  const fresh = shown.filter((place) => !place.isConnected);
  await keepCourse(shown, fresh, gone);
  const opened = new Set([...gone].flatMap((one) => [...one.querySelectorAll("details[open] > summary")].map((summary) => summary.textContent)));
  const focused = document.activeElement?.closest("[data-part]");
  const at = focused && gone.has(focused) ? [headOf(focused), [...focused.querySelectorAll("a, summary, button")].indexOf(document.activeElement)] : null;
  for (const place of fresh) place.querySelectorAll("details").forEach((one) => (one.open ||= opened.has(one.querySelector("summary").textContent)));
  gone.forEach((one) => {
    one.querySelectorAll("div.plot").forEach((place) => Plotly.purge(place));
    one.remove();
  });
  shown.forEach((place, number) => {
    const here = main.querySelectorAll(":scope > [data-part]")[number];
    if (here !== place) main.insertBefore(place, here ?? null);
  });
  for (const plot of fresh.flatMap((place) => [...place.querySelectorAll("div.plot")])) {
    if (plot.matches(".course")) beginCourse();
    await beginFigure(plot);
  }
  if (at) fresh.find((place) => headOf(place) === at[0])?.querySelectorAll("a, summary, button")[at[1]]?.focus({ preventScroll: true });
}

const headOf = (place) => place.querySelector("h2")?.textContent;

// The course stays where it is, with newer data.
async function keepCourse(shown, fresh, gone) {
  const newer = fresh.find((place) => place.querySelector("#course-data"));
  const older = [...gone].find((place) => place.querySelector("#course-data"));
  if (!newer || !older) return;
  const text = newer.querySelector("#course-data").textContent;
  older.querySelector("#course-data").textContent = text;
  older.dataset.part = newer.dataset.part;
  gone.delete(older);
  fresh.splice(fresh.indexOf(newer), 1);
  shown.splice(shown.indexOf(newer), 1, older);
  await course.update(JSON.parse(text));
}

async function ask() {
  if (live.asking || live.ended) return;
  clearTimeout(live.waiting);
  live.asking = true;
  try {
    const have = [...document.querySelectorAll("main > [data-part]")].map((one) => one.dataset.part).join(",");
    const answer = await fetch(`now?have=${have}`, { cache: "no-store", signal: AbortSignal.timeout(1000 * ANSWER_S) });
    if (answer.status === 404 || answer.status === 403) {
      live.ended = true;
      say("lost", "The server no longer knows this address: the run was deleted, or the server was restarted. Open the address that tdpp report --serve printed last. This page has stopped asking.");
      return;
    }
    if (!answer.ok) throw new Error(`it answered ${answer.status}`);
    const now = await answer.json();
    await put(now.parts);
    Object.assign(live, { unix: now.unix, seconds: now.seconds, failures: 0, ended: now.over });
    if (now.over) say("over", "The run is over; this page has stopped asking.");
    else say("", "The page follows the run without reloading.");
  } catch (error) {
    live.failures += 1;
    live.since ??= Date.now() / 1000;
    say("lost", `No answer from the server since ${clock(live.since)} (${error.message}). The page keeps what it has and asks again every ${Math.round(pause())} s. If tdpp report --serve has ended, start it again and open the address that it prints; this one will not work again.`);
  } finally {
    live.asking = false;
  }
  if (!live.failures) delete live.since;
  if (!live.ended) live.waiting = setTimeout(() => document.hidden || ask(), 1000 * pause());
}

const pause = () => Math.min(live.seconds * 2 ** Math.min(live.failures, 8), Math.max(LONGEST_S, live.seconds));

say("", "The page follows the run without reloading.");
document.addEventListener("visibilitychange", () => document.hidden || !live.waiting || ask()); // a tab that nobody sees asks nothing
Promise.allSettled(drawings).then(() => (live.waiting = setTimeout(() => document.hidden || ask(), 1000 * live.seconds)));
