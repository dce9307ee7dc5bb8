"use strict";
// Which rows the timeline of all ranks has. Of many ranks it begins with one replica and what differs from it; the
// others lie folded behind a line of their stage.

const MOST_NAMED = 3; // replicas on such a line

// Ranks that pass the filters, from top to bottom.
function chosenRanks() {
  const passes = (rank) => ["stage", "node", "dp"].every((key) => view[key] === "" || String(rank[key]) === view[key]);
  return run.ranks.flatMap((rank, index) => (passes(rank) ? [index] : []));
}

// Whether a rank is like another one, behind whose row it can be folded.
const isAlike = (rank) => run.like[rank] >= 0;

// A chosen node or replica shows all its ranks.
const folds = () => view.node === "" && view.dp === "";

// Whether a rank can be folded now: those of the critical path stay while it is drawn, those that failed always.
const canFold = (rank) => folds() && isAlike(rank) && !isCulprit(rank) && !(view.path && isOnPath(rank));

const isFolded = (rank) => canFold(rank) && !view.unfolded.has(run.ranks[rank].stage) && !view.asked.has(rank);

// What the rows show, from top to bottom: the ranks of a stage, a line for those that are folded, and what was predicted
// of the stage, as rank run.ranks.length + stage.
function makeRows() {
  const byStage = Map.groupBy(chosenRanks(), (rank) => run.ranks[rank].stage);
  return Array.from(byStage).flatMap(([stage, all]) => {
    const seen = all.filter((rank) => !isFolded(rank));
    const rows = seen.map((rank) => ({ rank, stage, label: run.ranks[rank].label, short: `rank ${rank}`, share: shareOf(rank) }));
    if (seen.length < all.length) rows.push({ stage, ...foldedText(stage, all.filter(isFolded)) });
    else if (all.some(canFold)) rows.push({ stage, ...unfoldedText(stage, all.filter(canFold).length) });
    if (view.predicted) rows.push({ rank: run.ranks.length + stage, stage, predicted: true, label: `predicted · stage ${run.stages[stage]}`, short: "predicted" });
    return rows;
  });
}

const howMany = (ranks) => (ranks === 1 ? "1 rank" : `${ranks} ranks`);

// Of what is folded; that it means a likeness in compute time and bubble is said once, above the rows.
function foldedText(stage, ranks) {
  const replicas = [...new Set(ranks.map((rank) => run.ranks[run.like[rank]].dp))].sort((a, b) => a - b);
  const some = [replicas.slice(0, -1).join(", "), replicas.at(-1)].filter((part) => part !== "").join(" or ");
  const like = replicas.length > MOST_NAMED ? `like one of ${replicas.length} replicas` : `like replica ${some}`;
  return { fold: `▸ ${howMany(ranks.length)} of stage ${run.stages[stage]} ${like}`, short: `▸ ${howMany(ranks.length)} ${like}` };
}

function unfoldedText(stage, ranks) {
  return { fold: `▾ fold ${howMany(ranks)} of stage ${run.stages[stage]}`, short: `▾ fold ${howMany(ranks)}` };
}

// The bubble of a rank in the iteration; null where it is not known.
function shareOf(rank) {
  const share = columns.bubble_share[rank * columns.iterations.length + view.iteration];
  return share < 0 ? null : share / 1000;
}

// Shows all ranks of the stage of a row, or folds those that are like others.
function toggle(row) {
  const { stage } = chart.rows[row];
  const of = (rank) => run.ranks[rank].stage === stage;
  if (chosenRanks().some((rank) => of(rank) && isFolded(rank))) view.unfolded.add(stage);
  else fold(of);
  draw();
}

// Those of the ranks that are like others.
function fold(chosen) {
  for (const rank of run.like.keys()) {
    if (!chosen(rank)) continue;
    view.unfolded.delete(run.ranks[rank].stage);
    view.asked.delete(rank);
  }
}

// The button that does so for all stages.
function toggleAll() {
  if (isUnfolded()) fold(() => true);
  else view.unfolded = new Set(run.like.flatMap((_, rank) => (isAlike(rank) ? [run.ranks[rank].stage] : [])));
  draw();
}

const isUnfolded = () => view.unfolded.size + view.asked.size > 0;

function updateFoldButton() {
  element("fold").hidden = !folds() || !run.like.some((_, rank) => isAlike(rank));
  element("fold").textContent = isUnfolded() ? "Fold similar ranks" : "Show all ranks";
}
