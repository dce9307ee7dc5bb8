"use strict";
// Which part of an event is waiting for another rank; the rest is work or transfer. reports/waits.py does the same.
// A receive waits until the other rank begins to send: the k-th message of an iteration from a rank to another, forward
// or backward, is what that one receives k-th. A collective waits until the last rank of its group begins: the k-th of a
// name is the same on all.

const ofReplicas = (rank) => `stage ${rank.stage} tp ${rank.tp}`;
const ofTensorGroup = (rank) => `stage ${rank.stage} dp ${rank.dp}`;
const NORM = "grad-norm-all-reduce"; // files that do not have it, have it inside the clipping
const CLIP = "optimizer-clip-main-grad";
// The group that a rank's collective waits for, as a text.
const GROUP_OF = {
  "grads-all-reduce": ofReplicas,
  "overlapped-grads-all-reduce": ofReplicas,
  "grads-reduce-scatter": ofReplicas,
  "params-all-gather": ofReplicas,
  "layernorm-grads-all-reduce": ofTensorGroup,
  "tensor-all-reduce": ofTensorGroup,
  "tensor-all-gather": ofTensorGroup,
  "tensor-reduce-scatter": ofTensorGroup,
  "embedding-grads-all-reduce": (rank) => `dp ${rank.dp} tp ${rank.tp}`,
  [NORM]: (rank) => `dp ${rank.dp}`,
  [CLIP]: (rank) => `dp ${rank.dp}`,
};

// What an event of this name sends and receives: "forward", "backward", both or nothing.
function messages(name) {
  const found = { send: [], recv: [] };
  let ways = [];
  for (const word of name.split("-")) {
    if (word === "forward" || word === "backward") ways.push(word);
    else if (Object.hasOwn(found, word) && ways.length) [found[word], ways] = [ways, []];
    else return { send: [], recv: [] };
  }
  return found;
}

// A function that gives the waiting nanoseconds of an event, or null where that cannot be told. It looks at the events
// of one iteration, order[from] ... order[to - 1].
function waits(events, names, ranks, from, to) {
  const moved = names.map(messages);
  const group = (name) => (Object.hasOwn(GROUP_OF, name) && !(name === CLIP && names.includes(NORM)) ? GROUP_OF[name] : null);
  const grouped = names.map(group);
  const sent = new Map(); // by message: when it was begun to be sent
  const last = new Map(); // by collective: when its last rank began
  const keys = new Map(); // by event: the messages that it receives, or its collective
  const counts = new Map();
  const numbered = (own) => {
    const number = counts.get(own) ?? 0;
    counts.set(own, number + 1);
    return number;
  };
  for (let at = from; at < to; at++) {
    const i = events.order[at];
    const [name, rank, peer, start] = [events.name[i], events.rank[i], events.peer[i], events.start[i]];
    if (grouped[name]) {
      const key = `${name} ${grouped[name](ranks[rank])} ${numbered(`${name} ${rank}`)}`;
      keys.set(i, [key]);
      last.set(key, Math.max(last.get(key) ?? -Infinity, start));
    } else if (peer >= 0) {
      const taken = (way, sender, receiver, does) => {
        const channel = `${way} ${sender} ${receiver}`;
        return `${channel} ${numbered(`${does} ${channel}`)}`;
      };
      for (const way of moved[name].send) sent.set(taken(way, rank, peer, "send"), start);
      if (moved[name].recv.length) keys.set(i, moved[name].recv.map((way) => taken(way, peer, rank, "recv")));
    }
  }
  return (i) => {
    const until = (keys.get(i) ?? []).map((key) => last.get(key) ?? sent.get(key)).filter((time) => time !== undefined);
    if (!until.length) return null;
    return Math.min(Math.max(Math.max(...until) - events.start[i], 0), events.end[i] - events.start[i]);
  };
}
