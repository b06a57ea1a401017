// Helpers of every page. Text from the data only ever becomes a text node or an attribute that holds no markup.

const data = JSON.parse(document.getElementById("data").textContent);
const SVG = "http://www.w3.org/2000/svg";

function fillIn(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes || {})) {
    if (name === "on") for (const [event, run] of Object.entries(value)) node.addEventListener(event, run);
    else if (name === "colour") node.style.setProperty("--role", value);
    else if (value !== null && value !== undefined && value !== false) node.setAttribute(name, value === true ? "" : value);
  }
  for (const child of children.flat(Infinity)) if (child !== null && child !== undefined) node.append(child);
  return node;
}

const el = (tag, attributes, ...children) => fillIn(document.createElement(tag), attributes, children);
const svg = (tag, attributes, ...children) => fillIn(document.createElementNS(SVG, tag), attributes, children);
const byId = (id) => document.getElementById(id);

const MISSING = "–";

function show(value) {
  if (value === null || value === undefined) return MISSING;
  if (value === 0 || Number.isInteger(value) && Math.abs(value) < 1e5) return String(value).replace("-", "−");
  const size = Math.abs(value);
  if (size < 1e-3 || size >= 1e5) return value.toExponential(1).replace("-", "−").replace("e-", "e−").replace("e+", "e");
  return value.toPrecision(3).replace("-", "−");
}

const words = (name) => String(name).replaceAll("_", " ");
const percent = (value) => (value === null || value === undefined ? MISSING : (100 * value).toFixed(1) + " %");

// Light and dark: the system's choice until the button or ?theme= says otherwise.
function setTheme(name) {
  document.documentElement.dataset.theme = name;
  byId("theme").textContent = name === "dark" ? "light theme" : "dark theme";
}
{
  const asked = new URLSearchParams(location.search).get("theme");
  const system = matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light";
  setTheme(asked === "dark" || asked === "light" ? asked : system);
  byId("theme").addEventListener("click", () =>
    setTheme(document.documentElement.dataset.theme === "dark" ? "light" : "dark"));
}

const roleColours = data ? Object.fromEntries(data.roles.map((role) => [role.name, role.colour])) : {};
const swatch = (role) => el("span", { class: "swatch", colour: roleColours[role] || "#949494" });
