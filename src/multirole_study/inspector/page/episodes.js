// Episodes side by side: a list of problems with filters and search, and one column per checkpoint.

const shown = data.episodes;
const state = { problem: null, columns: [], filter: "all", query: "", isShaded: false, signatures: new Set(Object.keys(SIGNATURES)) };

const episodeAt = (problem, step) => problem.steps[String(step)] || null;
const turnsOf = (problem) => state.columns.flatMap((step) => (episodeAt(problem, step) || { turns: [] }).turns);
const hits = (problem) => Object.values(problem.steps).reduce((sum, e) => sum + e.turns.filter((turn) => count(turn, state.query)).length, 0);
const isRight = (problem, step) => (episodeAt(problem, step) || {}).correct === true;

const contrasts = shown ? shown.contrasts : [];
const differs = ({ right, wrong }) => (p) => isRight(p, right) && episodeAt(p, wrong) !== null && !isRight(p, wrong);
const FILTERS = {
  all: { title: "all", keep: () => true },
  ...Object.fromEntries(contrasts.map((each) => [each.name, { title: each.title, keep: differs(each) }])),
  unparsed: { title: "unparsed turns", keep: (p) => turnsOf(p).some((turn) => turn.outcome === "unparsed") },
  truncated: { title: "truncated turns", keep: (p) => turnsOf(p).some((turn) => turn.finish === "length") },
};

// A turn decided where at least half of its redraws, with all else kept, turn the outcome of its episode.
const decided = (turn) => Boolean(turn.effects && turn.effects.resample && 2 * turn.effects.resample[0] >= turn.effects.resample[1]);
if (shown && shown.forked.length) FILTERS.decided = { title: "one turn decided", keep: (p) => turnsOf(p).some(decided) };

const kept = () => shown.problems.filter((p) => FILTERS[state.filter].keep(p) && (!state.query || hits(p)));
const stepTitle = (info) => (info.run ? `${info.run}, ` : "") + `iteration ${info.at ?? info.step}` + (info.accuracy === null ? "" : `, ${percent(info.accuracy)}`) + (info.name ? ` (${info.name})` : "");

const stepName = (step) => { const info = shown.steps.find((each) => each.step === step); return `iteration ${info.at ?? step}` + (info.run ? ` of ${info.run}` : ""); };

function buildEpisodes() {
  const place = byId("episodes");
  if (!shown) { place.append(el("p", { class: "muted" }, "No turn was recorded yet.")); return; }
  state.columns = [...shown.columns];
  const linked = decodeURIComponent(location.hash.slice(1)); // page.html#PROBLEM
  const first = shown.problems.find((p) => p.problem === linked);
  state.problem = first || contrasts.map((each) => kept().find(differs(each))).find(Boolean) || kept()[0] || null; // what a reader looks for
  const total = shown.n_validation === null ? "" : ` of ${shown.n_validation} validation problems`;
  const compared = contrasts.filter(({ right, wrong }) => right !== wrong).map(({ name, right, wrong }) => // those of the filter
    ` Right at ${stepName(right)} and wrong at ${stepName(wrong)}: ${shown.problems.filter(FILTERS[name].keep).length} of these` + (shown.n_lost === null ? "." : `, ${shown.n_lost} of all ${shown.n_validation}.`)).join("");
  const leftOut = shown.left_out ? ` ${shown.left_out} other checkpoints have their turns in the run's folder.` : "";
  place.append(el("p", { class: "muted" }, `The turns of ${shown.problems.length}${total}.${compared}${leftOut} Keys: left and right for the problem before and after.`));
  place.append(el("div", { class: "controls" }, el("div", { id: "filters", role: "group", "aria-label": "filter" }), searchBox(), el("span", { id: "found", class: "muted", role: "status" })));
  place.append(el("div", { class: "controls", id: "marks" }, signatureChips(), shadeSwitch()));
  if (shown.forked.length) place.append(el("p", { class: "muted" }, el("b", { class: "decided" }, "◆ this turn decided"),
    ` (iterations ${shown.forked.join(", ")}): the episode was replayed with this turn drawn again and all else kept, and in at least half of the replays a right answer became wrong, or a wrong one right. ` +
    "Base: the answer also turns if the untrained model plays this turn. Trivial: it turns if this turn is replaced by a fixed reply, such as picking candidate 1. Nothing is marked where no single turn decided."));
  place.append(el("p", { class: "muted" }, "Bars show who wrote how many tokens, in the order of the rounds. A green turn is right, a red one wrong, a grey one was not graded by itself. A click leads to its text."));
  place.append(el("div", { class: "browser" }, el("div", { class: "side" }, el("p", { class: "muted legend" }, el("span", { class: "dots" }, el("i", { class: "right" })), " right, ", el("span", { class: "dots" }, el("i", { class: "wrong" })),
    ` wrong, at iterations ${shown.steps.map((info) => info.step).join(", ")}`), el("div", { id: "list", role: "listbox", "aria-label": "problems" })), el("div", { id: "reader" })));
  document.addEventListener("keydown", (event) => {
    const isTyping = ["INPUT", "SELECT", "TEXTAREA"].includes(event.target.tagName) && event.target.type !== "checkbox";
    if (isTyping || event.altKey || event.ctrlKey || event.metaKey || !["ArrowLeft", "ArrowRight"].includes(event.key)) return;
    event.preventDefault();
    step(event.key === "ArrowRight" ? 1 : -1);
  });
  place.addEventListener("pointerover", hint);
  place.addEventListener("pointerout", () => { byId("hint").hidden = true; });
  redraw();
  if (first) place.scrollIntoView();
}

function step(by) {
  const list = kept(), at = list.indexOf(state.problem);
  if (list.length) select(list[Math.max(0, Math.min(list.length - 1, at + by))]);
}

function select(problem) {
  state.problem = problem;
  history.replaceState(null, "", "#" + encodeURIComponent(problem.problem)); // a link to what is shown
  redraw();
}

function searchBox() {
  const box = el("input", { type: "search", placeholder: "search all turns", "aria-label": "search all turns",
    on: { input: () => { state.query = box.value; keepSelection(); redraw(); } } });
  return box;
}

function keepSelection() {
  const list = kept();
  if (!list.includes(state.problem)) state.problem = list[0] || null;
}

function signatureChips() {
  return Object.entries(SIGNATURES).map(([kind, signature]) => {
    const box = el("input", { type: "checkbox", checked: true, on: { change: () => { box.checked ? state.signatures.add(kind) : state.signatures.delete(kind); drawReader(); } } });
    return el("label", { class: "chip" }, box, el("span", { class: "s-" + kind }, signature.title));
  });
}

function shadeSwitch() {
  if (!shown.problems.some((p) => Object.values(p.steps).some((e) => e.turns.some((turn) => turn.ratios)))) return null;
  const scale = el("span", { class: "scale", hidden: true }, `−${STRONGEST}`, [-4, -2, -1, 0, 1, 2, 4].map((v) => {
    const cell = el("i", {}); cell.style.backgroundColor = shade(v); return cell; }), `+${STRONGEST} nats`);
  const box = el("input", { type: "checkbox", id: "shade", on: { change: () => { state.isShaded = box.checked; scale.hidden = !box.checked; drawReader(); } } });
  return [el("label", { class: "chip" }, box, "shade tokens by log p(policy) − log p(base)"), scale];
}

function hint(event) {
  const ratio = event.target.dataset && event.target.dataset.ratio, box = byId("hint");
  if (ratio === undefined) return;
  box.textContent = ratio === "none" ? "no value" : `${Number(ratio) >= 0 ? "+" : "−"}${Math.abs(Number(ratio)).toFixed(2)} nats: ` +
    `${show(Math.exp(Math.abs(Number(ratio))))} times ${Number(ratio) >= 0 ? "more" : "less"} likely than under the base model`;
  const at = event.target.getBoundingClientRect();
  box.hidden = false;
  box.style.left = Math.min(at.left, innerWidth - box.offsetWidth - 8) + "px";
  box.style.top = at.bottom + 4 + "px";
}

function drawFilters() {
  byId("filters").replaceChildren(...Object.entries(FILTERS).map(([name, filter]) =>
    el("button", { type: "button", "aria-pressed": String(state.filter === name), on: { click: () => {
      state.filter = name; keepSelection(); redraw(); byId("filters").querySelector("[aria-pressed=true]").focus(); } } },
    filter.title + " ", el("b", {}, shown.problems.filter(filter.keep).length))));
}

function drawList() {
  const list = kept();
  const found = shown.steps.map((info) => [info.step, list.reduce((sum, p) => sum + (episodeAt(p, info.step) || { turns: [] }).turns.filter((t) => count(t, state.query)).length, 0)]);
  byId("found").textContent = state.query ? `${list.length} problems; turns at iteration ` + found.map(([at, n]) => `${at}: ${n}`).join(", ") : "";
  byId("list").replaceChildren(...list.map((problem) => el("button", { type: "button", role: "option", "aria-selected": String(problem === state.problem), on: { click: () => {
    select(problem); byId("list").querySelector("[aria-selected=true]").focus({ preventScroll: true }); } } },
  el("span", { class: "dots", title: shown.steps.map((info) => `iteration ${info.step}: ${outcome(episodeAt(problem, info.step))}`).join("\n") },
    shown.steps.map((info) => el("i", { class: grade(episodeAt(problem, info.step)) }))),
  el("span", { class: "question" }, problem.question))));
  if (!list.length) byId("list").append(el("p", { class: "muted" }, "No problem fits."));
  const selected = byId("list").querySelector("[aria-selected=true]");
  if (selected) byId("list").scrollTop = Math.max(0, selected.offsetTop - byId("list").clientHeight / 2);
}

// A task that gives a reward alone judges no episode.
const grade = (episode) => (episode === null || episode.correct === null ? "none" : episode.correct ? "right" : "wrong");
const outcome = (episode) => (episode === null ? "not recorded" : (episode.correct === null ? "not judged" : grade(episode)) + (["correct", "wrong", "passed", ""].includes(episode.reason) ? "" : `: ${words(episode.reason)}`)
  + (episode.reward === null || episode.reward === undefined ? "" : `, reward ${show(episode.reward)}`));

// One row per turn, the same turn in each column: round by round, in the order of the roles, then of their slots.
function turnKeys(problem) {
  const keys = new Map(), order = data.roles.map((role) => role.name);
  for (const turn of turnsOf(problem)) keys.set(JSON.stringify([turn.round, order.indexOf(turn.role), turn.slot]), turn);
  return [...keys.values()].sort((a, b) => a.round - b.round || order.indexOf(a.role) - order.indexOf(b.role) || a.slot - b.slot);
}

// What a role decided, in words: an aggregator's "2" is its choice and no slot.
function outcomeWords(duty, outcome) {
  const prefix = { selects: "picks", judges: "verdict:", plans: "plan as" }[duty];
  const [, digit] = /^digit:(\d)$/.exec(outcome) || []; // a selection without a box
  return (prefix ? prefix + " " : "") + (digit ? `${digit}, without a box` : words(outcome));
}

// What happens to the outcome of the episode if this turn alone is played differently.
function effectWords(effects) {
  const [turned, draws] = effects.resample || [0, 0];
  const others = [["base", "base"], ["twin", "trivial"]].filter(([how]) => effects[how]).map(([how, name]) => `${name}: ${effects[how][0] ? "turns" : "no change"}`);
  return [`outcome turns in ${turned} of ${draws} redraws`, ...others].join(" · ");
}

function drawTurn(turn) {
  if (!turn) return el("div", { class: "turn none" }, el("p", { class: "muted" }, "no such turn"));
  const several = data.roles.find((role) => role.name === turn.role).slots > 1;
  const duty = data.roles.find((role) => role.name === turn.role).duty;
  const rounds = data.rounds > 1 ? el("span", {}, `round ${turn.round + 1}`) : null;
  const flags = [turn.outcome === "unparsed" ? el("span", { class: "flag" }, "unparsed") : turn.outcome ? el("span", {}, outcomeWords(duty, turn.outcome)) : null,
    turn.finish === "length" ? el("span", { class: "flag" }, "truncated") : null];
  const effect = turn.effects ? el("div", { class: "effect" }, decided(turn) ? el("b", { class: "decided" }, "◆ this turn decided ") : null, effectWords(turn.effects)) : null;
  return el("div", { class: decided(turn) ? "turn deciding" : "turn", colour: roleColours[turn.role], tabindex: -1 },
    el("div", { class: "about" }, el("b", {}, turn.role + (several ? `, slot ${turn.slot + 1}` : "")), rounds, flags, el("span", { class: "count" }, `${turn.tokens} tokens`)), effect,
    el("pre", {}, drawText(turn, state)));
}

function drawReader() {
  const place = byId("reader"), problem = state.problem;
  if (!problem) { place.replaceChildren(el("p", { class: "muted" }, "Nothing to show: no problem fits the filter and the search.")); return; }
  const heads = state.columns.map((at, i) => {
    const choice = el("select", { "aria-label": `checkpoint of column ${i + 1}`, on: { change: () => { state.columns[i] = shown.steps[choice.selectedIndex].step; drawFilters(); drawReader(); } } },
      shown.steps.map((info) => el("option", { value: info.step, selected: info.step === at }, stepTitle(info))));
    const episode = episodeAt(problem, at);
    return el("div", { class: "column-head" }, choice, el("span", { class: "outcome " + grade(episode) }, outcome(episode)));
  });
  const find = (at, key) => (episodeAt(problem, at) || { turns: [] }).turns.find((t) => t.role === key.role && t.slot === key.slot && t.round === key.round);
  const keys = turnKeys(problem), cards = keys.map((key) => state.columns.map((at) => drawTurn(find(at, key))));
  const list = kept(), grid = el("div", { class: "grid" }, heads, drawLanes(keys, find, cards, state.columns.map((at) => episodeAt(problem, at))), cards);
  grid.style.setProperty("--columns", state.columns.length);
  place.replaceChildren(
    el("div", { class: "problem" }, el("button", { type: "button", "aria-label": "problem before", on: { click: () => step(-1) } }, "←"),
      el("span", { class: "muted" }, `${list.indexOf(problem) + 1} of ${list.length}`),
      el("button", { type: "button", "aria-label": "problem after", on: { click: () => step(1) } }, "→"), el("p", { class: "asked" }, problem.question)), grid);
}

function redraw() { drawFilters(); drawList(); drawReader(); }
