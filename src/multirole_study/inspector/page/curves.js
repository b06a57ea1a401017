// The curves with their shared cursor. `data.lines` has the colour and the dashes of each series by its name.

const iterations = data.iterations;
const bestStep = (data.facts.find((fact) => fact.fact === "best") || { iteration: null }).iteration;
const lastIteration = Math.max(1, iterations.at(-1) || 0, ...data.validation.map((each) => each.step.at(-1) || 0));
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

const lineOf = (name) => data.lines[name] || { colour: "var(--ink)", dash: null };

function allPanels() {
  const panels = [], measured = data.validation.filter((each) => each.step.length);
  if (measured.length) panels.push({ name: "validation accuracy", unit: `%, n=${measured[0].n.at(-1)}, 95 % Wilson`, scale: "fraction", isSparse: true, group: "main",
    series: measured.map((each) => ({ name: each.name, ...lineOf(each.name), x: each.step, y: each.accuracy, low: each.low, high: each.high })) });
  const skillName = ({ role, measure }) => `${role} ${measure}`;
  for (const name of new Set(data.skills.map(skillName))) {
    const rows = data.skills.filter((row) => skillName(row) === name), { role } = rows[0], hasTrivial = rows.some((row) => row.trivial.some((value) => value !== null));
    const curve = (row) => ({ name: row.run || "", y: row.skill, x: row.step, colour: roleColours[role] || "var(--ink)", dash: row.run ? lineOf(row.run).dash : null });
    const trivial = (row) => ({ name: row.run ? `trivial, ${row.run}` : "trivial", y: row.trivial, x: row.step, colour: "var(--second)", dash: "1.5 2" });
    panels.push({ name: role ? name : "whole workflow", unit: hasTrivial ? "dotted: a trivial role" : "fraction", scale: "rate", isSparse: true, group: "skills",
      series: rows.flatMap((row) => [curve(row), trivial(row)]).filter((series) => series.y.some((value) => value !== null)) });
  }
  for (const panel of data.panels)
    panels.push({ ...panel, series: Object.entries(panel.series).map(([name, y]) => ({ name, y, x: iterations, ...lineOf(name) })) });
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
