// The facts of the run, the roles' table, the curves with their shared cursor, and training groups.

const iterations = data.iterations;
const bestStep = (data.facts.find((fact) => fact.fact === "best") || { iteration: null }).iteration;
const lastIteration = Math.max(1, iterations.at(-1) || 0, data.validation.step.at(-1) || 0);
const cursor = { iteration: null, listeners: [] };

function setCursor(iteration) {
  cursor.iteration = Math.max(0, Math.min(lastIteration, Math.round(iteration)));
  for (const listen of cursor.listeners) listen(cursor.iteration);
}

// The value at an iteration; sparse series (validation) hold their last value.
function valueAt(series, iteration, isSparse) {
  const at = isSparse ? lastBefore(series, iteration) : series.x.indexOf(iteration);
  return at < 0 ? null : series.y[at];
}

const lastBefore = (series, iteration) => series.x.filter((x) => x <= iteration).length - 1;

const LINEAR = 1e-4; // a divergence is drawn linearly below this size, as in the notebooks
const SCALES = {
  linear: { to: (v) => v },
  rate: { to: (v) => v },
  log: { to: (v) => (v > 0 ? Math.log10(v) : null) },
  divergence: { to: (v) => Math.log10(1 + Math.max(0, v) / LINEAR) }, // an estimate below zero is noise, drawn at zero
};

function niceTicks(low, high, count) {
  const rough = (high - low) / count, power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 2.5, 5, 10].map((m) => m * power).find((s) => s >= rough * 0.999);
  const ticks = [];
  for (let i = Math.ceil(low / step - 1e-9); i * step <= high + step * 1e-9; i++) ticks.push(Number((i * step).toPrecision(12)));
  return ticks;
}

function thin(ticks, most) {
  const step = Math.ceil(ticks.length / most);
  return ticks.filter((_, i) => (ticks.length - 1 - i) % step === 0);
}

function domain(panel) {
  const values = panel.series.flatMap((s) => [...s.y, ...(s.low || []), ...(s.high || [])]).filter((v) => v !== null);
  let low = Math.min(...values), high = Math.max(...values);
  if (panel.scale === "fraction") return { low: Math.min(0, low), high: 1, ticks: [0, 0.25, 0.5, 0.75, 1] };
  if (panel.scale === "log") {
    low = Math.max(low, 1e-12);
    if (high / low < 30) {
      [low, high] = [low * 0.97, high * 1.03];
      return { low, high, ticks: niceTicks(low, high, 4).filter((t) => t > 0) };
    }
    const ticks = [];
    for (let p = Math.floor(Math.log10(low)); p <= Math.ceil(Math.log10(high)); p++) ticks.push(10 ** p);
    return { low, high, ticks: thin(ticks.filter((t) => t >= low && t <= high), 4) };
  }
  if (panel.scale === "divergence") {
    high = Math.max(high, 1e-2);
    const ticks = [0];
    for (let p = Math.log10(LINEAR); 10 ** p <= high * 1.001; p++) ticks.push(10 ** p);
    return { low: 0, high, ticks: ticks.length > 5 ? [0, ...thin(ticks.slice(1), 3)] : ticks };
  }
  if (low >= 0) low = 0;
  if (panel.scale === "rate") high = Math.max(high, 0.05);
  if (high <= low) high = low + 1;
  return { low, high: high + (high - low) * 0.04, ticks: niceTicks(low, high, 3) };
}

function linePath(series, x, y) {
  let path = "", isDown = false;
  series.x.forEach((at, i) => {
    const value = series.y[i], place = value === null ? null : y(value);
    if (place === null || !Number.isFinite(place)) { isDown = false; return; }
    path += (isDown ? "L" : "M") + x(at).toFixed(1) + " " + place.toFixed(1);
    isDown = true;
  });
  return path;
}

const showTick = (value) => (Math.abs(value) >= 1e-3 && Math.abs(value) < 1e5 ? String(value).replace("-", "−") : show(value));

const HEIGHT = 136, LEFT = 46, RIGHT = 8, TOP = 9, BOTTOM = 18;

function drawPanel(panel, holder) {
  const width = holder.clientWidth;
  if (!width) return;
  const { low, high, ticks } = domain(panel), to = (SCALES[panel.scale] || SCALES.linear).to;
  const x = (i) => LEFT + (width - LEFT - RIGHT) * i / lastIteration;
  const y = (v) => { const t = to(v); return t === null ? null : TOP + (HEIGHT - TOP - BOTTOM) * (1 - (t - to(low)) / (to(high) - to(low))); };
  const root = svg("svg", { width, height: HEIGHT, role: "img", "aria-label": panel.name + " over the iterations" });
  for (const tick of ticks) {
    root.append(svg("line", { class: "grid", x1: LEFT, x2: width - RIGHT, y1: y(tick), y2: y(tick) }));
    root.append(svg("text", { class: "tick", x: LEFT - 6, y: y(tick) + 3.5, "text-anchor": "end" },
      panel.scale === "fraction" ? String(100 * tick) : showTick(tick)));
  }
  for (const tick of niceTicks(0, lastIteration, Math.max(2, Math.min(6, width / 70))).filter(Number.isInteger))
    root.append(svg("text", { class: "tick", x: x(tick), y: HEIGHT - 4, "text-anchor": "middle" }, show(tick)));
  if (bestStep !== null) root.append(svg("line", { class: "best", x1: x(bestStep), x2: x(bestStep), y1: TOP, y2: HEIGHT - BOTTOM },
    svg("title", {}, `best checkpoint, iteration ${bestStep}`)));
  for (const series of panel.series) {
    const group = svg("g", { class: "series", colour: series.colour });
    if (series.low) series.x.forEach((at, i) => group.append(
      svg("line", { class: "interval", x1: x(at), x2: x(at), y1: y(series.low[i]), y2: y(series.high[i]) })));
    group.append(svg("path", { class: "line", d: linePath(series, x, y), "stroke-dasharray": series.dash }));
    if (series.low || series.x.length === 1) series.x.forEach((at, i) => series.y[i] === null ? null : group.append(
      svg("circle", { cx: x(at), cy: y(series.y[i]), r: series.x.length > 25 ? 1.6 : 2.6 })));
    root.append(group);
  }
  const mark = svg("g", { class: "cursor" });
  root.append(mark);
  holder.replaceChildren(root);
  panel.move = (iteration) => {
    mark.replaceChildren(svg("line", { x1: x(iteration), x2: x(iteration), y1: TOP - 4, y2: HEIGHT - BOTTOM }));
    for (const series of panel.series) {
      const value = valueAt(series, iteration, panel.isSparse), place = value === null ? null : y(value);
      if (place !== null && !panel.isSparse)
        mark.append(svg("circle", { class: "dot", colour: series.colour, cx: x(iteration), cy: place, r: 3.2 }));
    }
  };
  const follow = (event) => {
    const at = (event.clientX - root.getBoundingClientRect().left - LEFT) / (width - LEFT - RIGHT);
    if (at >= -0.02 && at <= 1.02) setCursor(at * lastIteration);
  };
  root.addEventListener("pointermove", follow);
  root.addEventListener("pointerdown", follow);
  if (cursor.iteration !== null) panel.move(cursor.iteration);
}

function panelFigure(panel) {
  const values = el("div", { class: "values" }), holder = el("div", { class: "plot" });
  const figure = el("figure", { class: "panel" },
    el("figcaption", {}, el("span", { class: "title" }, panel.name), el("span", { class: "unit" }, panel.unit || "")), values, holder);
  const readouts = panel.series.map((series) => {
    const readout = el("b");
    const sample = svg("svg", { class: "series sample", colour: series.colour, width: 20, height: 8, "aria-hidden": "true" },
      svg("path", { class: "line", d: "M0 4H20", "stroke-dasharray": series.dash }));
    values.append(el("span", { class: "value" }, sample, series.name ? series.name + " " : null, readout));
    return readout;
  });
  cursor.listeners.push((iteration) => {
    panel.series.forEach((series, i) => {
      const value = valueAt(series, iteration, panel.isSparse);
      const since = panel.isSparse ? series.x[lastBefore(series, iteration)] : iteration;
      readouts[i].textContent = (panel.scale === "fraction" ? percent(value) : show(value)) + (value !== null && since !== iteration ? ` (at ${since})` : "");
    });
    if (panel.move) panel.move(iteration);
  });
  new ResizeObserver(() => drawPanel(panel, holder)).observe(holder);
  return figure;
}

// Styles beside the colours, for readers and printers that do not tell these apart.
const LINES = [null, "5 2.5", "1.5 2", "7 2 1.5 2"];
const lineStyle = (name) => LINES[Math.max(0, data.roles.findIndex((role) => role.name === name)) % LINES.length];

function allPanels() {
  const { validation } = data, panels = [];
  if (validation.step.length) panels.push({ name: "validation accuracy", unit: `%, n=${validation.n.at(-1)}, 95 % Wilson`, scale: "fraction",
    isSparse: true, group: "main", series: [{ name: "", colour: "var(--ink)", x: validation.step, y: validation.accuracy, low: validation.low, high: validation.high }] });
  for (const { role, measure, step, skill, trivial } of data.skills)
    panels.push({ name: role ? `${role} ${measure}` : "whole workflow", unit: trivial.some((value) => value !== null) ? "dotted: a trivial role" : "fraction", scale: "rate", isSparse: true, group: "skills",
      series: [{ name: "", y: skill, x: step, colour: roleColours[role] || "var(--ink)" }, { name: "trivial", y: trivial, x: step, colour: "var(--second)", dash: "1.5 2" }]
        .filter((series) => series.y.some((value) => value !== null)) });
  for (const panel of data.panels)
    panels.push({ ...panel, series: Object.entries(panel.series).map(([name, y]) => ({ name, y, x: iterations, colour: roleColours[name] || "var(--ink)", dash: lineStyle(name) })) });
  return panels;
}

// A number that moves the cursor to its iteration.
const jump = (iteration) => el("button", { type: "button", class: "link", title: "show this iteration in the curves", on: { click: () => setCursor(iteration) } }, iteration);

function buildCursorBar() {
  const where = el("output", { class: "where" });
  const slider = el("input", { type: "range", min: 0, max: lastIteration, step: 1, value: lastIteration, "aria-label": "iteration",
    on: { input: () => setCursor(Number(slider.value)) } });
  byId("cursor-bar").append(el("label", {}, "iteration ", where), slider);
  cursor.listeners.push((iteration) => {
    slider.value = iteration;
    where.textContent = iteration;
  });
}

function buildHeader() {
  if (data.index) byId("back").append(el("a", { href: data.index }, "all runs"), " / ");
  const planned = data.config.max_steps, reached = iterations.at(-1) || 0;
  byId("status").append(`${data.regime}. ${reached}${planned && planned !== reached ? ` of ${planned}` : ""} iterations, ${data.state}. `, el("code", {}, data.name));
  byId("facts").append(...data.facts.map((fact) => el("div", { class: "fact" }, el("dt", {}, fact.fact, " at iteration ", jump(fact.iteration)),
    el("dd", {}, fact.value), el("dd", { class: "muted small" }, fact.detail))));
  if (!data.facts.length) byId("facts").append(el("p", { class: "muted" }, "No evaluation was recorded."));
  const rows = (object) => el("table", { class: "config" }, Object.entries(object).filter(([name]) => !["versions", "resumed", "argv"].includes(name)).map(([name, value]) =>
    el("tr", {}, el("th", {}, name), el("td", {}, value !== null && typeof value === "object" ? JSON.stringify(value) : String(value)))));
  document.querySelector("#configuration .tables").append(rows(data.config), rows(data.provenance));
}

// Which role got better or worse: its skill at the first and at the last evaluation.
function buildRoleChanges() {
  const place = byId("role-changes"), changes = data.role_changes;
  if (!changes.length) { place.append(el("p", { class: "muted" }, "No skill of a role was recorded twice.")); return; }
  const named = (row) => row.role || "the whole workflow";
  const said = { better: "got better", worse: "got worse", "": "shows no clear change" };
  const bySaid = Object.keys(said).map((verdict) => [said[verdict], [...new Set(changes.filter((row) => row.role && row.verdict === verdict).map((row) => `${named(row)} (${row.counted})`))]]);
  place.append(el("p", {}, bySaid.filter(([, names]) => names.length).map(([words, names]) => `${words[0].toUpperCase()}${words.slice(1)}: ${names.join("; ")}. `)));
  const change = (row) => (row.after >= row.before ? "+" : "−") + Math.abs(100 * (row.after - row.before)).toFixed(1);
  place.append(el("div", { class: "scroll" }, el("table", { class: "numbers" },
    el("thead", {}, el("tr", {}, ["role", "counted", `iteration ${changes[0].from}`, `iteration ${changes[0].to}`, "change, points", "", "a trivial role, last", "cases, last"].map((name) => el("th", { class: name === "counted" ? "words" : null }, name)))),
    el("tbody", {}, changes.map((row) => el("tr", {}, el("th", {}, row.role ? swatch(row.role) : null, named(row)), el("td", { class: "words" }, row.counted), el("td", {}, percent(row.before)), el("td", {}, percent(row.after)),
      el("td", {}, change(row)), el("td", { class: "verdict " + row.verdict }, row.verdict || "no clear change"), el("td", {}, percent(row.trivial)), el("td", {}, row.cases)))))),
  el("p", { class: "muted small" }, "Better or worse: the 95 % interval of the change over the cases, of this run alone, does not hold 0 (rough for balanced verdicts). A trivial role in the same place chooses at random or always says the same; for the whole workflow it is the first answer alone."));
}

// Per role: where three of its metrics peaked, and two more at its first and last iteration.
const PEAKS = { chi2: "chi2", perplexity: "perplexity", grad_norm: "gradient norm" };
const CHANGES = { length_mean: ["completion length", show], unparsed_rate: ["unparsed turns", percent] };

function buildRoleTable() {
  const series = (column, role) => (data.panels.find((panel) => panel.column === column && panel.table === "roles") || { series: {} }).series[role] || [];
  const peak = (values) => {
    const at = values.reduce((best, value, i) => (value !== null && (best < 0 || value > values[best]) ? i : best), -1);
    return at < 0 ? [el("td", {}, MISSING), el("td", {})] : [el("td", {}, show(values[at])), el("td", { class: "at" }, jump(iterations[at]))];
  };
  const ends = (values, format) => { const held = values.filter((v) => v !== null); return [held[0], held.at(-1)].map((v) => el("td", {}, format(v))); };
  const named = data.roles.filter(({ name }) => series("perplexity", name).length || series("length_mean", name).length);
  if (!named.length) { byId("role-table").append(el("p", { class: "muted" }, "No per-role numbers were recorded yet.")); return; }
  byId("role-table").append(el("div", { class: "scroll" }, el("table", { class: "numbers" },
    el("thead", {}, el("tr", {}, el("th", {}), Object.values(PEAKS).map((name) => el("th", { colspan: 2 }, name)),
      Object.values(CHANGES).map(([name]) => el("th", { colspan: 2 }, name))),
    el("tr", {}, el("th", {}), Object.keys(PEAKS).map(() => [el("th", {}, "peak"), el("th", {}, "at")]),
      Object.keys(CHANGES).map(() => [el("th", {}, "first"), el("th", {}, "last")]))),
    el("tbody", {}, named.map(({ name }) => el("tr", {}, el("th", {}, swatch(name), name),
      Object.keys(PEAKS).map((column) => peak(series(column, name))),
      Object.entries(CHANGES).map(([column, [, format]]) => ends(series(column, name), format))))))));
}

// What each role is worth, where `multirole role_value` has measured it.
const PLAYED_BY = { resample: "another draw", base: "the base model", twin: "a trivial role" };

function buildRoleValues() {
  if (!data.role_values.length) return;
  const points = (row, name, sign) => {
    const text = (value) => (value === null ? MISSING : (sign && value > 0 ? "+" : value < 0 ? "−" : "") + Math.abs(100 * value).toFixed(1));
    return `${text(row[name])} [${text(row[name + "_low"])}, ${text(row[name + "_high"])}]`;
  };
  byId("role-values").append(el("h3", {}, "What each role is worth"), el("p", { class: "muted small" },
    `The first ${data.role_values[0].problems} validation problems were replayed with all turns of one role played by another draw, by the untrained base model, or by a trivial role. ` +
    "A role is worth what is lost without it: a negative change under base or trivial. Brackets are 95 % intervals over problems, of this run alone."),
  el("div", { class: "scroll" }, el("table", { class: "numbers" },
    el("thead", {}, el("tr", {}, ["iteration", "role", "played by", "accuracy", "change, points", "answers that turn, %", "share of tokens", "share of its adapter's gradient"].map((name) => el("th", {}, name)))),
    el("tbody", {}, data.role_values.map((row) => el("tr", {}, el("td", {}, row.step), el("th", {}, swatch(row.role), row.role), el("td", {}, PLAYED_BY[row.how] || row.how),
      el("td", {}, percent(row.before)), el("td", {}, points(row, "change", true)), el("td", {}, points(row, "moved", false)), el("td", {}, percent(row.token_share)), el("td", {}, percent(row.grad_share))))))));
}

const GROUPS = { main: "", skills: "Skill of the roles", gradients: "Gradients", signatures: "Signatures of the texts", more: "More" };

function buildCurves() {
  const panels = allPanels(), place = byId("panels");
  if (!panels.length) { place.append(el("p", { class: "muted" }, "No iteration and no evaluation was recorded yet.")); return; }
  buildCursorBar();
  for (const [group, title] of Object.entries(GROUPS)) {
    const own = panels.filter((panel) => panel.group === group);
    if (!own.length) continue;
    const grid = el("div", { class: "panels" }, own.map(panelFigure));
    place.append(title ? el("details", { open: ["skills", "gradients"].includes(group) && innerWidth > 900 }, el("summary", {}, title), grid) : grid);
  }
  const first = data.facts.find((fact) => fact.fact === "first fall");
  setCursor(first ? first.iteration : lastIteration);
}

// The groups of the iteration under the cursor, or of the last recorded one before it: reward above advantage, per episode.
function buildGroups() {
  if (!data.training_groups) return;
  const recorded = Object.keys(data.training_groups).map(Number).sort((a, b) => a - b), holder = el("div", { class: "groups" }), where = el("p", { class: "muted" });
  byId("groups-section").hidden = false;
  byId("groups").append(where, holder);
  const signed = (value) => (value < 0 ? "−" : "+") + Math.abs(value).toFixed(2);
  cursor.listeners.push((iteration) => {
    const at = recorded.filter((i) => i <= iteration).at(-1) ?? recorded[0], groups = data.training_groups[at];
    const equal = groups.filter(([, episodes]) => new Set(episodes.map(([reward]) => reward)).size === 1).length;
    where.textContent = `iteration ${at}; groups of equal rewards: ${equal} of ${groups.length}. Each box is an episode: its reward, and its advantage below.`;
    holder.replaceChildren(...groups.map(([problem, episodes]) => el("div", { class: "group" }, el("span", { class: "problem-id", title: data.questions[problem] ?? problem }, data.questions[problem] ?? problem.split("/").at(-1)),
      el("div", { class: "cells" }, episodes.map(([reward, advantage, correct], i) => {
        const isScored = reward !== null; // false for an episode whose workflow failed
        const is = correct === null ? "" : correct ? "right" : "wrong";
        const cell = el("span", { class: "cell " + is, title: `episode ${i + 1} ${isScored ? is : "without a reward"}` },
          el("b", {}, show(reward)), el("small", {}, isScored ? signed(advantage) : "none"));
        cell.style.backgroundColor = shade(advantage * 1.5);
        return cell;
      })))));
  });
}

buildHeader();
buildRoleChanges();
buildRoleTable();
buildRoleValues();
buildGroups();
buildCurves();
