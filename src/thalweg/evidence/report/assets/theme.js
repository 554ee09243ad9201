// The theme follows the system until the reader chooses; plots take their colors from the page.
const root = document.documentElement;
const dark = matchMedia("(prefers-color-scheme: dark)");
function stored() {
  try { return localStorage.getItem("theme"); } catch { return null; }
}
function apply() {
  root.dataset.theme = stored() ?? (dark.matches ? "dark" : "light");
  if (!window.Plotly) return;
  const style = getComputedStyle(root);
  const [text, grid] = ["--text", "--line"].map((name) => style.getPropertyValue(name).trim());
  const ground = style.getPropertyValue("--ground").trim();
  for (const plot of document.querySelectorAll(".js-plotly-plot")) {
    const change = {
      "font.color": text, "font.family": "system-ui, sans-serif",
      "hoverlabel.bgcolor": ground, "hoverlabel.font.color": text,
    };
    for (const axis of ["xaxis", "yaxis"]) {
      change[`${axis}.gridcolor`] = grid;
      change[`${axis}.linecolor`] = grid;
      change[`${axis}.zerolinecolor`] = grid;
    }
    Plotly.relayout(plot, change);
  }
}
root.dataset.theme = stored() ?? (dark.matches ? "dark" : "light");
dark.addEventListener("change", apply);
addEventListener("load", () => {
  apply();
  document.getElementById("theme").addEventListener("click", () => {
    const next = root.dataset.theme === "dark" ? "light" : "dark";
    try { localStorage.setItem("theme", next); } catch { /* private mode: for this page only */ }
    root.dataset.theme = next;
    apply();
    root.dataset.theme = next;
  });
});
