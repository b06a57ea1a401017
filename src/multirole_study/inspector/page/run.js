// The page of one run: its facts, the roles' tables, training groups, and all other parts.

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
  const at = (share, iteration, usual) => [percent(share), iteration === usual ? "" : ` (iteration ${iteration})`];
  const change = (row) => (row.after >= row.before ? "+" : "−") + Math.abs(100 * (row.after - row.before)).toFixed(1);
  place.append(el("div", { class: "scroll" }, el("table", { class: "numbers" },
    el("thead", {}, el("tr", {}, ["role", "counted", `iteration ${changes[0].from}`, `iteration ${changes[0].to}`, "change, points", "", "a trivial role, last", "cases, last"].map((name) => el("th", { class: name === "counted" ? "words" : null }, name)))),
    el("tbody", {}, changes.map((row) => el("tr", {}, el("th", {}, row.role ? swatch(row.role) : null, named(row)), el("td", { class: "words" }, row.counted), el("td", {}, at(row.before, row.from, changes[0].from)), el("td", {}, at(row.after, row.to, changes[0].to)),
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
buildGraph();
buildEpisodes();
