// The page of two runs: the facts of each, their curves in common panels, and the same problem in both.

function runHead(run) {
  const facts = run.facts.map((fact) => el("tr", {}, el("th", {}, `${fact.fact} at iteration ${fact.iteration}`), el("td", {}, fact.value), el("td", { class: "muted" }, fact.detail)));
  const sample = svg("svg", { class: "series sample", colour: "var(--ink)", width: 24, height: 8, "aria-hidden": "true" }, svg("path", { class: "line", d: "M0 4H24", "stroke-dasharray": lineOf(run.name).dash }));
  return el("div", { class: "run-head" }, el("h2", {}, sample, `${run.name}: ${run.title}`), el("p", { class: "muted" }, `${run.regime}. ${run.n_iterations} iterations, ${run.state}. `, el("code", {}, run.folder)),
    facts.length ? el("div", { class: "scroll" }, el("table", { class: "numbers" }, el("tbody", {}, facts))) : el("p", { class: "muted" }, "No evaluation was recorded."));
}

function buildPair() {
  byId("heads").append(...data.runs.map(runHead));
  const settings = data.differing.map(([name, ...values]) => el("tr", {}, el("th", {}, name), values.map((value) => el("td", {}, value === null ? MISSING : typeof value === "object" ? JSON.stringify(value) : String(value)))));
  byId("differing").append(settings.length ? el("div", { class: "scroll" }, el("table", { class: "config" }, el("thead", {}, el("tr", {}, el("th", {}), data.runs.map((run) => el("th", {}, run.name)))), el("tbody", {}, settings)))
    : el("p", { class: "muted" }, "The two runs have the same settings."));
}

buildPair();
buildCurves();
buildEpisodes();
