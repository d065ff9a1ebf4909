/* Start: the theme, the copy button, and the figure and the table where there are nodes. */

const root = document.documentElement;
/** Pages opened from disk may have no storage; the choice then lasts as long as the page. */
const stored = (theme) => {
  try {
    if (theme) localStorage.setItem("onnxamp-theme", theme);
    return localStorage.getItem("onnxamp-theme");
  } catch {
    return null;
  }
};
const chosenTheme = stored();
if (chosenTheme === "light" || chosenTheme === "dark") root.dataset.theme = chosenTheme;
byId("theme").addEventListener("click", () => {
  const isDark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  root.dataset.theme = isDark ? "light" : "dark";
  stored(root.dataset.theme);
});

/** Pages from plain http, in frames and in viewers may have no clipboard; the selection can be copied there, or is left. */
byId("copy")?.addEventListener("click", async () => {
  const command = byId("command");
  let isCopied = true;
  try {
    await navigator.clipboard.writeText(command.textContent);
  } catch {
    getSelection().selectAllChildren(command);
    isCopied = document.execCommand("copy");
  }
  byId("copy").textContent = isCopied ? "Copied" : "Selected";
  setTimeout(() => { byId("copy").textContent = "Copy"; }, 1600);
});

startCandidates();
if (count) {
  startTable();
  goTo = reach;
  startFigure();
}
