// How a turn's text is drawn: signatures and search hits as marks, tokens shaded by log p(policy) - log p(base).

const escapeRegExp = (text) => text.replace(/[.*+?^${}()|[\]\\]/g, "\\$&");
const HEDGES = new RegExp(`(?<!\\w)(?:${data.hedges.map(escapeRegExp).join("|")})(?!\\w)`, "gi");
const SIGNATURES = {
  verdict: { title: "verdict", find: (text) => spans(text, /\\boxed\{(?:correct|incorrect)\}/gi) },
  box: { title: "\\boxed{…}", find: (text) => boxes(text).filter((span) => span.isClosed) },
  open: { title: "box never closed", find: (text) => boxes(text).filter((span) => !span.isClosed) },
  hedge: { title: "hedging", find: (text) => spans(text, HEDGES) },
  fence: { title: "code fence", find: (text) => spans(text, /```[^\n]*\n?[\s\S]*?(?:```|$)/g) },
};

function spans(text, pattern) {
  return Array.from(text.matchAll(pattern), (match) => ({ from: match.index, to: match.index + match[0].length })).filter((s) => s.to > s.from);
}

// Every \boxed{ and where its braces close; one that does not close before the next box is open.
function boxes(text) {
  const found = [], starts = spans(text, /\\boxed\s*\{/g);
  starts.forEach((start, i) => {
    const limit = i + 1 < starts.length ? starts[i + 1].from : text.length;
    let depth = 1, at = start.to;
    for (; at < limit && depth; at++) depth += text[at] === "{" ? 1 : text[at] === "}" ? -1 : 0;
    found.push(depth ? { from: start.from, to: start.to, isClosed: false } : { from: start.from, to: at, isClosed: true });
  });
  return found;
}

const joined = (pieces) => pieces.join("");
const textOf = (turn) => turn.text ?? (turn.joined ??= joined(turn.pieces));

function tokenSpans(turn) {
  let at = 0;
  return turn.pieces.map((piece, i) => ({ from: at, to: (at += piece.length), ratio: turn.ratios[i] }));
}

const STRONGEST = 4; // nats at which the shading is full

function shade(ratio) {
  if (ratio === null || ratio === undefined) return "";
  const part = Math.round(Math.min(1, Math.abs(ratio) / STRONGEST) * 82);
  return `color-mix(in srgb, var(${ratio > 0 ? "--more" : "--less"}) ${part}%, transparent)`;
}

// The text in pieces, cut wherever a mark or a token begins or ends; every piece is a text node.
function drawText(turn, settings) {
  const isShaded = settings.isShaded && turn.ratios;
  const text = isShaded ? joined(turn.pieces) : textOf(turn); // these differ where a character spans several tokens
  const gap = turn.gap ? joined(turn.pieces.slice(0, turn.gap[0])).length : null;
  const layers = [];
  for (const [kind, signature] of Object.entries(SIGNATURES))
    if (settings.signatures.has(kind)) layers.push(...signature.find(text).map((span) => ({ ...span, kind })));
  if (settings.query) layers.push(...spans(text, new RegExp(escapeRegExp(settings.query), "gi")).map((span) => ({ ...span, kind: "hit" })));
  const tokens = isShaded ? tokenSpans(turn) : [];
  const cuts = [...new Set([0, text.length, ...[...layers, ...tokens].flatMap((span) => [span.from, span.to]), ...(gap === null ? [] : [gap])])]
    .filter((at) => at <= text.length).sort((a, b) => a - b);
  layers.sort((a, b) => a.from - b.from);
  const out = document.createDocumentFragment();
  let next = 0, token = 0, active = [];
  for (let i = 0; i + 1 < cuts.length; i++) {
    const [from, to] = [cuts[i], cuts[i + 1]];
    if (gap === from) out.append(gapMark(turn.gap[1]));
    while (next < layers.length && layers[next].from <= from) active.push(layers[next++]);
    active = active.filter((span) => span.to > from);
    while (token < tokens.length && tokens[token].to <= from) token += 1;
    const piece = text.slice(from, to), kinds = [...new Set(active.map((span) => span.kind))];
    if (!kinds.length && !tokens[token]) { out.append(piece); continue; }
    const node = el("span", { class: kinds.map((kind) => "s-" + kind).join(" ") }, piece);
    if (tokens[token] && tokens[token].from <= from) {
      node.dataset.ratio = tokens[token].ratio === null ? "none" : tokens[token].ratio;
      node.style.backgroundColor = shade(tokens[token].ratio);
    }
    out.append(node);
  }
  if (gap === text.length) out.append(gapMark(turn.gap[1]));
  return out;
}

const gapMark = (count) => el("span", { class: "gap" }, ` [${count.toLocaleString("en")} characters are left out here; the Parquet file has them] `);

const count = (turn, query) => (query ? textOf(turn).toLowerCase().split(query.toLowerCase()).length - 1 : 0);
