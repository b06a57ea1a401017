// An episode as lanes, one for each slot of a role: a bar per turn, whose width is its tokens and whose colour says whether the turn was right.

// Turns of one role in one round stand at the same place: they run together. Clocks are not recorded, so the order is that of the rounds.
// The last lane has a dot for the episode's answer, and the tokens of the longest path to it.
function stagesOf(keys, turnAt) {
  const stages = new Map();
  for (const key of keys) {
    const turn = turnAt(key), name = JSON.stringify([key.round, key.role]);
    stages.set(name, Math.max(stages.get(name) || 0, turn ? turn.tokens : 0));
  }
  return stages;
}

const sum = (numbers) => numbers.reduce((total, value) => total + value, 0);
const RIGHT_WORDS = { true: "right", false: "wrong", undefined: "not graded by itself" };

function openTurn(card) {
  card.scrollIntoView({ block: "center" });
  card.focus({ preventScroll: true });
}

const answerLane = (episode, left, tokens) => {
  const dot = el("i", { class: grade(episode), title: outcome(episode) });
  dot.style.left = `${left}%`;
  const place = left < 50 ? "right-of-dot" : ""; // else the text would lie under the dot
  return el("div", { class: "lane" }, el("span", { class: "lane-name muted" }, "answer"), el("span", { class: `track dots end-of-lanes muted ${place}` }, `${tokens} tokens`, dot));
};

// One drawing per column, on a common scale of tokens. `cards` are the texts that a click leads to, by key and column.
function drawLanes(keys, find, cards, episodes) {
  const stages = state.columns.map((at) => stagesOf(keys, (key) => find(at, key)));
  const scale = Math.max(1, ...stages.map((each) => sum([...each.values()])));
  const order = data.roles.map((role) => role.name);
  const lanes = [...new Map(keys.map((key) => [JSON.stringify([key.role, key.slot]), key])).values()].sort((a, b) => order.indexOf(a.role) - order.indexOf(b.role) || a.slot - b.slot);
  return state.columns.map((at, column) => {
    let next = 0;
    const starts = new Map([...stages[column]].map(([name, tokens]) => { const start = next; next += tokens; return [name, start]; }));
    const bars = (lane) => keys.flatMap((key, row) => {
      const turn = find(at, key);
      if (!turn || key.role !== lane.role || key.slot !== lane.slot) return [];
      const start = starts.get(JSON.stringify([key.round, key.role])), words = `${key.role}, slot ${key.slot + 1}, round ${key.round + 1}: ${turn.tokens} tokens, ${RIGHT_WORDS[turn.right]}`;
      const bar = el("button", { type: "button", class: "bar-of-turn " + (turn.right === undefined ? "none" : turn.right ? "right" : "wrong"), title: words, "aria-label": words, on: { click: () => openTurn(cards[row][column]) } });
      bar.style.left = (100 * start / scale) + "%";
      bar.style.width = (100 * turn.tokens / scale) + "%";
      return [bar];
    });
    const several = (role) => data.roles.find((each) => each.name === role).slots > 1;
    return el("div", { class: "lanes" },
      lanes.map((lane) => el("div", { class: "lane" }, el("span", { class: "lane-name" }, swatch(lane.role), lane.role + (several(lane.role) ? ` ${lane.slot + 1}` : "")), el("span", { class: "track" }, bars(lane)))),
      answerLane(episodes[column], 100 * next / scale, next));
  });
}
