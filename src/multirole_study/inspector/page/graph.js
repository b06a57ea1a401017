// The workflow: question, roles with their slots, answer; below, a band per adapter under the roles that it serves.

const NODE = { least: 112, character: 7.4, height: 30, gap: 10, between: 76, end: 66 };
const DASHES = ["", "7 3", "12 3 3 3", "4 2"];
const START = " question", END = " answer"; // no role can have these names

function buildGraph() {
  const roles = Object.fromEntries(data.roles.map((role) => [role.name, role]));
  // Who reads what is declared by the workflow; of one that declares nothing the order of the recorded turns is drawn.
  const isKnown = data.edges.length > 0, order = Object.keys(roles);
  const known = data.edges.map((edge) => withEnds(edge, roles)).filter((edge) => [edge.source, edge.target].every((name) => roles[name] || [START, END].includes(name)));
  const columns = isKnown ? [...new Set(known.flatMap((edge) => [edge.source, edge.target]))].filter((name) => roles[name]) : order;
  const names = [START, ...columns, END];
  const edges = isKnown ? known.filter((edge) => !edge.is_loop).map((edge) => [edge.source, edge.target, edge.label])
    : names.slice(1).map((name, i) => [names[i], name, ""]);
  const back = known.filter((edge) => edge.is_loop).map((edge) => [edge.source, edge.target, edge.label]);
  const adapters = [...new Set(order.map((name) => roles[name].adapter))].filter(Boolean);
  const most = Math.max(1, ...columns.map((name) => roles[name].slots));
  const nodeWidth = Math.max(NODE.least, ...columns.map((name) => NODE.character * (name.length + 4)));
  const isEnd = (i) => i === 0 || i === names.length - 1;
  const above = edges.some(([a, b]) => names.indexOf(b) - names.indexOf(a) > 1) ? 44 : 24;
  const inner = most * (NODE.height + NODE.gap) - NODE.gap, middle = above + inner / 2;
  const place = {};
  let left = 2;
  names.forEach((name, i) => {
    const width = isEnd(i) ? NODE.end : nodeWidth, slots = isEnd(i) ? 1 : roles[name].slots;
    const top = middle - (slots * (NODE.height + NODE.gap) - NODE.gap) / 2;
    place[name] = { left, right: left + width, tops: Array.from({ length: slots }, (_, s) => top + s * (NODE.height + NODE.gap)) };
    left += width + NODE.between;
  });
  const width = left - NODE.between + 2, bottom = above + inner + (back.length ? 52 : 14);
  const drawing = svg("g", {});
  const label = (x, y, words, length = 13) => words && drawing.append(svg("text", { class: "edge-label", "text-anchor": "middle" },
    wrap(words, length).map((line, i, all) => svg("tspan", { x, y: y - 5 - 12 * (all.length - 1 - i) }, line))));
  const centre = (name, slot) => place[name].tops[slot] + NODE.height / 2;
  for (const [from, to, words] of edges) {
    const a = place[from], b = place[to];
    if (names.indexOf(to) - names.indexOf(from) > 1) {
      const x1 = (a.left + a.right) / 2, x2 = (b.left + b.right) / 2;
      drawing.append(svg("path", { class: "edge", d: `M${x1} ${a.tops[0] - 1}C${x1} 10 ${x2} 10 ${x2} ${b.tops[0] - 3}`, "marker-end": "url(#arrow)" }));
      label((x1 + x2) / 2, 18, words, 60);
      continue;
    }
    a.tops.forEach((_, i) => b.tops.forEach((_, j) => drawing.append(svg("path", { class: "edge", "marker-end": "url(#arrow)",
      d: `M${a.right + 1} ${centre(from, i)}C${a.right + 30} ${centre(from, i)} ${b.left - 34} ${centre(to, j)} ${b.left - 3} ${centre(to, j)}` }))));
    label((a.right + b.left) / 2, Math.min(centre(from, 0), centre(to, 0)) - 4, words);
  }
  for (const [from, to, words] of back) {
    const a = place[from], b = place[to], y = above + inner, own = from === to;
    const x1 = own ? a.left + (a.right - a.left) * 0.7 : (a.left + a.right) / 2, x2 = own ? a.left + (a.right - a.left) * 0.3 : (b.left + b.right) / 2;
    drawing.append(svg("path", { class: "edge", d: `M${x1} ${y + 1}C${x1} ${y + 30} ${x2} ${y + 30} ${x2} ${y + 3}`, "marker-end": "url(#arrow)" }));
    const rounds = data.rounds > 1 ? `${words ? "; " : ""}${data.rounds} rounds at most` : "";
    label((x1 + x2) / 2, y + 42, words + rounds, 60);
  }
  for (const name of [START, END]) drawing.append(
    svg("rect", { class: "end", x: place[name].left, y: place[name].tops[0], width: NODE.end, height: NODE.height, rx: 15 }),
    svg("text", { class: "node", x: (place[name].left + place[name].right) / 2, y: middle + 4, "text-anchor": "middle" }, name.trim()));
  const rows = bandRows(adapters, columns, roles);
  const lines = [];
  columns.forEach((name) => {
    const { left: x, right, tops } = place[name], dash = DASHES[adapters.indexOf(roles[name].adapter) % DASHES.length] || "";
    const row = rows[roles[name].adapter];
    if (row !== undefined) lines.push(svg("line", { class: "serves", colour: roles[name].colour, x1: (x + right) / 2, x2: (x + right) / 2,
      y1: tops.at(-1) + NODE.height, y2: bottom + 30 * row }));
    tops.forEach((y, slot) => drawing.append(
      svg("rect", { class: "role", colour: roles[name].colour, x, y, width: nodeWidth, height: NODE.height, rx: 4, "stroke-dasharray": dash }),
      svg("text", { class: "node", x: (x + right) / 2, y: y + NODE.height / 2 + 4, "text-anchor": "middle" }, tops.length > 1 ? `${name} ${slot + 1}` : name)));
  });
  adapters.forEach((adapter, i) => {
    const own = columns.filter((name) => roles[name].adapter === adapter);
    if (!own.length) return;
    const x = place[own[0]].left, right = place[own.at(-1)].right, y = bottom + 30 * rows[adapter];
    drawing.append(svg("rect", { class: "adapter", x, y, width: right - x, height: 22, rx: 4, "stroke-dasharray": DASHES[i % DASHES.length] }),
      svg("text", { class: "node small", x: (x + right) / 2, y: y + 15, "text-anchor": "middle" }, (own.length > 1 ? "one adapter: " : "") + adapter));
  });
  drawing.append(...lines); // above the bands: one may pass a band on its way to its own
  const height = bottom + 30 * (1 + Math.max(-1, ...Object.values(rows))) + 2;
  const partners = columns.filter((name) => roles[name].played_by);
  const arrow = svg("marker", { id: "arrow", viewBox: "0 0 8 8", refX: 7, refY: 4, markerWidth: 7, markerHeight: 7, orient: "auto" }, svg("path", { class: "head", d: "M0 0.8L7.5 4L0 7.2z" }));
  byId("graph").append(svg("svg", { viewBox: `0 0 ${width} ${height}`, width, role: "img", "aria-label": "the workflow and its adapters" }, svg("defs", {}, arrow), drawing),
    el("p", { class: "muted small" }, (data.edges_are_declared ? "" : isKnown ? "Arrows: the order of the recorded turns, by round and then by role. " : "Roles in the order of their first turns. ") +
      (adapters.length === 1 && columns.length > 1 && !partners.length ? "All roles train one adapter." : "The band below a role is the adapter that it trains.") +
      partners.map((name) => ` ${name} is not trained, but played by ${roles[name].played_by}.`).join("")));
}

// A role may be called "question" or "answer", too: an edge from such a role to the same name leads to the end.
function withEnds(edge, roles) {
  const isSame = edge.source === edge.target && !edge.is_loop;
  return {
    ...edge,
    source: edge.source === "question" && (!roles.question || isSame) ? START : edge.source,
    target: edge.target === "answer" && (!roles.answer || isSame) ? END : edge.target,
  };
}

function wrap(words, length) {
  const lines = [""];
  for (const word of words.split(" "))
    if ((lines.at(-1) + " " + word).trim().length > length && lines.at(-1)) lines.push(word);
    else lines[lines.length - 1] = (lines.at(-1) + " " + word).trim();
  return lines;
}

// Bands side by side in one row, where the columns that they span do not overlap; else one below the other.
function bandRows(adapters, columns, roles) {
  const rows = {}, spans = [];
  for (const adapter of adapters) {
    const at = columns.map((name, i) => (roles[name].adapter === adapter ? i : -1)).filter((i) => i >= 0);
    if (!at.length) continue;
    let row = 0;
    while (spans.some((span) => span.row === row && span.from <= at.at(-1) && at[0] <= span.to)) row += 1;
    spans.push({ row, from: at[0], to: at.at(-1) });
    rows[adapter] = row;
  }
  return rows;
}
