"use strict";
// Which part of an event is waiting: of a receive the time until the other rank begins to send, of an all-reduce the
// time until the last rank of its group begins. The rest is transfer.

const SEND_OF = { "forward-recv": ["forward-send", -1], "backward-recv": ["backward-send", 1] };
// The group that a rank's all-reduce waits for, as a text.
const GROUP_OF = {
  "grads-all-reduce": (rank) => `stage ${rank.stage} tp ${rank.tp}`,
  "layernorm-grads-all-reduce": (rank) => `stage ${rank.stage} dp ${rank.dp}`,
  "embedding-grads-all-reduce": (rank) => `dp ${rank.dp} tp ${rank.tp}`,
  "optimizer-clip-main-grad": (rank) => `dp ${rank.dp}`,
};

// The chunk of the stage that sends what chunk `chunk` of `stage` receives; messages wrap around from the last stage.
function sendingChunk(stage, step, chunk, stages) {
  const sender = stage + step;
  return sender < 0 ? chunk - 1 : sender >= stages ? chunk + 1 : chunk;
}

// A function that gives the waiting nanoseconds of an event, or null where that cannot be told. It looks at the events
// of one iteration, order[from] ... order[to - 1].
function waits(events, names, ranks, from, to) {
  const stages = Math.max(...ranks.map((rank) => rank.stage)) + 1;
  const sent = new Map();
  const last = new Map();
  const turn = new Map(); // by event: its key among the all-reduces of its group
  const counts = new Map();
  const sendKey = (name, rank, peer, microBatch, chunk) => `${name} ${rank} ${peer} ${microBatch} ${chunk}`;
  for (let at = from; at < to; at++) {
    const i = events.order[at];
    const name = names[events.name[i]];
    const rank = events.rank[i];
    if (name === "forward-send" || name === "backward-send") {
      sent.set(sendKey(name, rank, events.peer[i], events.micro_batch[i], events.chunk[i]), events.start[i]);
    } else if (Object.hasOwn(GROUP_OF, name)) {
      const own = `${name} ${rank}`;
      const number = counts.get(own) ?? 0;
      counts.set(own, number + 1);
      const key = `${name} ${GROUP_OF[name](ranks[rank])} ${number}`;
      turn.set(i, key);
      last.set(key, Math.max(last.get(key) ?? -Infinity, events.start[i]));
    }
  }
  return (i) => {
    const name = names[events.name[i]];
    let until = last.get(turn.get(i));
    if (Object.hasOwn(SEND_OF, name)) {
      const [send, step] = SEND_OF[name];
      const chunk = sendingChunk(ranks[events.rank[i]].stage, step, events.chunk[i], stages);
      until = sent.get(sendKey(send, events.peer[i], events.rank[i], events.micro_batch[i], chunk));
    }
    if (until === undefined) return null;
    return Math.min(Math.max(until - events.start[i], 0), events.end[i] - events.start[i]);
  };
}
